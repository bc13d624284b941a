"""How many sequences fit into a KV cache at a time: the real bookkeeping, driven token by token over a length mix."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.reservation import ContiguousKVCacheManager, reserved_slots
from vllm_teach.kvcache.waste import Lengths


@dataclass(frozen=True)
class Occupancy:
    """What happened, step by step: `utilization` is tokens stored / slots held, `waiting` the length of the queue."""

    name: str
    num_slots: int
    utilization: tuple[float, ...]
    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    num_preemptions: int = 0
    num_moved: int = 0

    @property
    def num_steps(self) -> int:
        """Steps until the last request ended."""
        return len(self.in_flight)

    @property
    def mean_utilization(self) -> float:
        """The mean over the steps in which a request waited, so that it was memory that was short."""
        return self._mean_under_demand(self.utilization)

    @property
    def mean_in_flight(self) -> float:
        """Sequences in the cache at a time, the mean over the same steps."""
        return self._mean_under_demand(self.in_flight)

    def _mean_under_demand(self, values: Sequence[float]) -> float:
        chosen = [value for value, waiting in zip(values, self.waiting, strict=True) if waiting]
        if not chosen:
            raise InvalidArgumentError(
                f"num_slots={self.num_slots} held all requests at once, so that none waited: "
                "give more requests or less memory."
            )
        return sum(chosen) / len(chosen)


class Memory(Protocol):
    """What the simulation asks of a KV cache; sequences are numbers."""

    name: str
    num_slots: int

    def admit(self, seq: int, num_tokens: int, lengths: tuple[int, int]) -> bool:
        """Make room for the first `num_tokens` of `seq`, whose true lengths only a reservation may look at."""

    def grow(self, seq: int, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` of `seq`; False: there is none."""

    def end(self, seq: int) -> None:
        """Give back all of `seq`."""

    def runs_of(self, seq: int) -> list[tuple[int, int]]:
        """Return where the slots of `seq` lie, as (first slot, slots), in the order of its tokens."""

    @property
    def slots_held(self) -> int:
        """Slots that are someone's."""

    @property
    def num_moved(self) -> int:
        """Blocks moved by compaction so far."""


class ReservedMemory:
    """One contiguous run for a sequence's whole life, first fit. Never short of memory once it is admitted."""

    num_moved = 0

    def __init__(self, num_slots: int, reservation: str, max_len: int) -> None:
        self.name = f"{reservation} ({max_len})" if reservation == "max" else reservation
        self.num_slots, self.reservation, self.max_len = num_slots, reservation, max_len
        self._runs = ContiguousKVCacheManager(num_slots, 1)

    def admit(self, seq: int, num_tokens: int, lengths: tuple[int, int]) -> bool:
        """Reserve what the rule says, if a run of that length is free."""
        slots = reserved_slots(self.reservation, *lengths, self.max_len)
        if slots > self.num_slots:
            raise _too_long(slots, self.num_slots)
        if not self._runs.can_allocate(slots):
            return False
        self._runs.allocate(seq, slots)
        return True

    def grow(self, seq: int, num_tokens: int) -> bool:
        """All is reserved already."""
        return True

    def end(self, seq: int) -> None:
        """Give back the run."""
        self._runs.free(seq)

    def runs_of(self, seq: int) -> list[tuple[int, int]]:
        """Return its one run."""
        held = self._runs.reservation(seq)
        return [(held.first_slot, held.num_slots)]

    @property
    def slots_held(self) -> int:
        """Slots reserved."""
        return self._runs.slots_held


class PagedMemory:
    """The engine's own KVCacheManager, without a prefix cache: every prompt is another.

    A sequence is admitted as the scheduler admits: if its tokens fit and `watermark` of the blocks stay free.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int = 16,
        placement: str = "scattered",
        watermark: float = 0.01,
        compact_above: float = 0.5,
    ) -> None:
        self.name = f"paged, {placement}, block_size {block_size}"
        self.kv = KVCacheManager(
            num_slots // block_size, block_size, prefix_cache=None, placement=placement, compact_above=compact_above
        )
        self.num_slots = self.kv.num_blocks * block_size
        self._reserve = int(watermark * self.kv.num_blocks)

    def admit(self, seq: int, num_tokens: int, lengths: tuple[int, int]) -> bool:
        """Take the blocks of the tokens there are."""
        if sum(lengths) > self.kv.max_tokens:
            raise _too_long(sum(lengths), self.kv.max_tokens)
        self.kv.begin(seq, range(num_tokens), share=False)
        room = self.kv.pool.num_available - (self._reserve if self.kv.pool.num_held else 0)
        if self.kv.blocks_to_extend(seq, num_tokens) <= room and self.kv.extend(seq, num_tokens):
            return True
        self.kv.free(seq)
        return False

    def grow(self, seq: int, num_tokens: int) -> bool:
        """Take another block if the last one is full."""
        grown = self.kv.extend(seq, num_tokens)
        self.kv.take_transfers()
        return grown

    def end(self, seq: int) -> None:
        """Give back the blocks."""
        self.kv.free(seq)

    def runs_of(self, seq: int) -> list[tuple[int, int]]:
        """Return its blocks, the spare ones last."""
        table, size = self.kv.table(seq), self.kv.block_size
        return [(block * size, size) for block in (*table.blocks, *table.spare)]

    @property
    def slots_held(self) -> int:
        """Slots of the blocks held, the spare ones included."""
        return self.kv.pool.num_held * self.kv.block_size

    @property
    def num_moved(self) -> int:
        """Blocks moved by compaction so far."""
        return self.kv.usage().moves


# Told, in each step, the sequences in the cache and how many tokens each sequence (by number) has. Both are the
# simulation's own lists: to be read, and at once.
Observe = Callable[[Sequence[int], Sequence[int]], None]


def simulate_occupancy(lengths: Lengths, memory: Memory, observe: Observe | None = None) -> Occupancy:
    """Run all requests of `lengths` (prompt, output), which are there from the start, through `memory`.

    First come, first served; each step every sequence gains one token, and whoever fits is admitted with its whole
    prompt. When a sequence cannot grow, the one that came last is preempted and computed anew later. There is no limit
    but memory. `observe` is called in each step, when all who fit are admitted. Raises InvalidArgumentError when a
    request could never fit.
    """
    waiting = deque(range(len(lengths)))
    running: list[int] = []
    tokens = [prompt for prompt, _ in lengths]
    record: list[tuple[float, int, int]] = []
    preemptions = 0
    while waiting or running:
        preempted = _grow_all(running, waiting, tokens, memory)
        preemptions += preempted
        while waiting and not preempted and memory.admit(waiting[0], tokens[waiting[0]], lengths[waiting[0]]):
            running.append(waiting.popleft())
        stored = sum(tokens[seq] for seq in running)
        record.append((stored / memory.slots_held, len(running), len(waiting)))
        if observe is not None:
            observe(running, tokens)
        for seq in list(running):
            tokens[seq] += 1
            if tokens[seq] >= sum(lengths[seq]):
                running.remove(seq)
                memory.end(seq)
    utilization, in_flight, queued = zip(*record, strict=True) if record else ((), (), ())
    return Occupancy(memory.name, memory.num_slots, utilization, in_flight, queued, preemptions, memory.num_moved)


def compare_occupancy(
    lengths: Lengths, num_slots: int, *, max_lens: Iterable[int] = (8192,), block_size: int = 16
) -> list[Occupancy]:
    """Return the occupancy of a cache of `num_slots`: paged, and reserved by each rule.

    Max length is reserved once for each of `max_lens` and once for the longest of `lengths`, the least there could be.
    """
    longest = max(prompt + output for prompt, output in lengths)
    memories: list[Memory] = [PagedMemory(num_slots, block_size)]
    memories += [ReservedMemory(num_slots, "max", max_len) for max_len in (*max_lens, longest)]
    memories += [ReservedMemory(num_slots, reservation, longest) for reservation in ("power_of_two", "oracle")]
    return [simulate_occupancy(lengths, memory) for memory in memories]


def _grow_all(running: list[int], waiting: deque[int], tokens: list[int], memory: Memory) -> int:
    """Give each of `running` room for its next token, the first come first; return how many were preempted for it."""
    before = len(running)
    for seq in list(running):
        while seq in running and not memory.grow(seq, tokens[seq]):
            last = running.pop()
            memory.end(last)
            waiting.appendleft(last)
    return before - len(running)


def _too_long(num_tokens: int, num_slots: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"lengths has a request of {num_tokens} slots, but num_slots={num_slots}: give more.")
