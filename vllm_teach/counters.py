"""Count the arithmetic and the bytes of an algorithm, in the two-level memory of the FlashAttention paper.

The model (arXiv 2205.14135, sections 2.1 and 3.2): all tensors live in a large *slow memory* (a GPU's HBM). Arithmetic
happens in a small *fast memory* of a given size (the on-chip SRAM of one GPU core). Every byte that crosses between the
two is counted, whoever computes it and however long it takes:

- Each algorithm reports the transfers that its own loop makes, as a GPU program running that loop would make them.
  A matrix product is charged for reading each operand once and for writing its result once, unless the result is
  consumed before it leaves fast memory.
- Something that has to stay in fast memory between two steps names its `working_set_bytes` and its `spill_bytes`.
  When the working set is larger than the fast memory, the spill is written to slow memory once and read back once;
  when it fits, the spill costs nothing.
- FLOPs are those of the matrix products, two per multiply-add. Exponentials and rescaling are not counted.

The counts are exact integers and the same on every machine, which wall time is not:

    with counters.count(fast_memory_bytes=100 * 1024) as tally:
        flash_attention_forward(q, k, v)
    print(tally.bytes_moved, tally.flops)

Libraries that compute attention inside one call of their own (PyTorch's SDPA, flash-attn, xFormers) report nothing:
their loops cannot be seen from here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Integral

from vllm_teach.errors import InvalidArgumentError


@dataclass
class Work:
    """An amount of work: matrix-product FLOPs, and bytes read from and written to slow memory."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed between slow and fast memory, in either direction."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved, the roofline's horizontal axis; infinite when nothing moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else float("inf")

    def add(self, flops: int, bytes_read: int, bytes_written: int) -> None:
        """Add to the three counts, in place."""
        self.flops += flops
        self.bytes_read += bytes_read
        self.bytes_written += bytes_written


@dataclass
class Tally(Work):
    """The work reported inside one `count` context: the totals, and the same split by the name of the step."""

    fast_memory_bytes: int = 100 * 1024
    by_name: dict[str, Work] = field(default_factory=dict)

    def charge(self, name: str, amounts: Mapping[str, int], times: int = 1) -> None:
        """Add a step that is done `times` times, in place; `amounts` are `report`'s arguments, each of them there or 0.

        A working set larger than the fast memory adds the spill to the bytes written and to the bytes read.
        """
        spills = amounts.get("working_set_bytes", 0) > self.fast_memory_bytes
        spilled = amounts.get("spill_bytes", 0) if spills else 0
        flops = times * amounts.get("flops", 0)
        read = times * (amounts.get("bytes_read", 0) + spilled)
        written = times * (amounts.get("bytes_written", 0) + spilled)
        self.add(flops, read, written)
        self.by_name.setdefault(name, Work()).add(flops, read, written)


# A tuple and not a list: opening or closing a context changes nothing for tasks that are already running beside it.
_open_tallies: ContextVar[tuple[Tally, ...]] = ContextVar("vllm_teach_open_tallies", default=())


@contextmanager
def count(fast_memory_bytes: int = 100 * 1024) -> Iterator[Tally]:
    """Yield a `Tally` that grows with every `report` made until the `with` block ends.

    Contexts nest, and every open one counts, each by its own `fast_memory_bytes`. The default of 100 KiB is about
    what one thread block of an A100 can use. An asyncio task or `asyncio.to_thread` started inside the block inherits
    the context and is counted, also after the block has ended; a plain `threading.Thread` and what runs elsewhere are
    not.

    Raises InvalidArgumentError when `fast_memory_bytes` is no positive whole number.
    """
    if not _is_whole(fast_memory_bytes) or fast_memory_bytes <= 0:
        raise InvalidArgumentError(f"fast_memory_bytes is {fast_memory_bytes!r}; give a positive number of bytes.")
    tally = Tally(fast_memory_bytes=fast_memory_bytes)
    token = _open_tallies.set((*_open_tallies.get(), tally))
    try:
        yield tally
    finally:
        _open_tallies.reset(token)


def report(
    name: str,
    *,
    flops: int = 0,
    bytes_read: int = 0,
    bytes_written: int = 0,
    working_set_bytes: int = 0,
    spill_bytes: int = 0,
) -> None:
    """Add one step's work to every open tally; outside any `count` context this does nothing.

    `working_set_bytes` is what the step holds in fast memory at once. For a tally whose fast memory is smaller,
    `spill_bytes` are added to the bytes written and to the bytes read.

    Raises InvalidArgumentError when an amount is negative or no whole number.
    """
    amounts = {
        "flops": flops,
        "bytes_read": bytes_read,
        "bytes_written": bytes_written,
        "working_set_bytes": working_set_bytes,
        "spill_bytes": spill_bytes,
    }
    for argument, amount in amounts.items():
        if not _is_whole(amount):
            raise InvalidArgumentError(f"{argument} of {name!r} is {amount!r}; report whole numbers.")
        if amount < 0:
            raise InvalidArgumentError(f"{argument} of {name!r} is {amount}; report amounts that are not negative.")
    for tally in _open_tallies.get():
        tally.charge(name, amounts)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
