"""`vllm-teach bench memory`: what a KV cache of one size holds, paged and reserved, over a length mix; exact."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import MIXES
from vllm_teach.kvcache.occupancy import Occupancy, compare_occupancy
from vllm_teach.kvcache.waste import Lengths, padding_waste

_MOST_REQUESTS = 100_000


@dataclass(frozen=True)
class MemoryBench:
    """`occupancies` has paging first; `padding` is the share of positions that static batches of 32 compute in vain."""

    mix: str
    num_requests: int
    seed: int
    mean_prompt: float
    mean_output: float
    longest: int
    padding: float
    occupancies: tuple[Occupancy, ...]

    def to_json(self) -> dict[str, object]:
        """Return the summary as plain data."""
        summary = {key: value for key, value in asdict(self).items() if key != "occupancies"}
        return summary | {
            "rows": [
                {
                    "memory": each.name,
                    "utilization": each.mean_utilization,
                    "in_flight": each.mean_in_flight,
                    "steps": each.num_steps,
                    "preemptions": each.num_preemptions,
                }
                for each in self.occupancies
            ]
        }


def bench_memory(
    mix: str = "sharegpt", num_requests: int = 1000, num_slots: int = 65_536, block_size: int = 16, seed: int = 0
) -> MemoryBench:
    """Serve `num_requests` of a length mix, one token of each a step, from a cache of `num_slots` tokens.

    Reservation is measured with max length = 8,192, with the longest request of the mix, with powers of two, and with
    an oracle (Kwon et al. 2023, section 6.1). Raises InvalidArgumentError for an unknown mix, for more than 100,000
    requests, and for a cache that has no block, cannot hold a request or holds all at once.
    """
    if mix not in MIXES:
        raise InvalidArgumentError(f"mix={mix!r} is not known: choose one of {', '.join(MIXES)}.")
    if num_requests > _MOST_REQUESTS:
        raise InvalidArgumentError(f"num_requests={num_requests} would take hours: use at most {_MOST_REQUESTS}.")
    if block_size > num_slots:
        raise InvalidArgumentError(f"block_size={block_size} is not valid: use 1 to num_slots={num_slots}.")
    lengths = MIXES[mix].draw(num_requests, seed)
    _check_demand(lengths, num_slots, block_size)
    return MemoryBench(
        mix=mix,
        num_requests=num_requests,
        seed=seed,
        mean_prompt=sum(prompt for prompt, _ in lengths) / num_requests,
        mean_output=sum(output for _, output in lengths) / num_requests,
        longest=max(map(sum, lengths)),
        padding=padding_waste(lengths, 32).share,
        occupancies=tuple(compare_occupancy(lengths, num_slots, block_size=block_size)),
    )


def _check_demand(lengths: Lengths, num_slots: int, block_size: int) -> None:
    """Raise InvalidArgumentError where no request would wait, before the bookkeeping of so many blocks is made."""
    needed = sum(-(-sum(each) // block_size) * block_size for each in lengths)
    if num_slots > 1.02 * needed:  # paging keeps a hundredth free
        raise InvalidArgumentError(
            f"num_slots={num_slots} holds all requests at once, {needed} slots, so that none waits: give more requests "
            "or less memory."
        )


def format_memory(bench: MemoryBench) -> str:
    """Return the table; utilisation and sequences in flight are means over the steps in which a request waited."""
    paged = bench.occupancies[0]
    lines = [
        f"{bench.num_requests:,} requests of the {bench.mix} mix (seed {bench.seed}): mean {bench.mean_prompt:.0f} "
        f"tokens in, {bench.mean_output:.0f} out, the longest {bench.longest:,}; {paged.num_slots:,} slots",
        "",
        f"  {'KV cache':<34}{'utilisation':>12}{'in flight':>11}{'paged / this':>14}{'steps':>9}{'preempted':>11}",
    ]
    for each in bench.occupancies:
        lines.append(
            f"  {each.name:<34}{each.mean_utilization:>11.1%}{each.mean_in_flight:>12.1f}"
            f"{paged.mean_in_flight / each.mean_in_flight:>13.1f}x{each.num_steps:>9,}{each.num_preemptions:>11,}"
        )
    lines += ["", f"static batches of 32 would compute {bench.padding:.0%} of their positions for padding"]
    return "\n".join(lines)
