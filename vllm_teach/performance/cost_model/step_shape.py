"""What of a step decides how long it takes: a few sums over its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_teach.kvcache.transfers import Transfer


class Scheduled(Protocol):
    """What is asked of a plan's item; `engine.plan.ScheduledSequence` is one."""

    @property
    def start(self) -> int:
        """The position of its first token."""

    @property
    def num_tokens(self) -> int:
        """How many tokens it computes."""

    @property
    def samples(self) -> bool:
        """Whether it draws a token."""


class Item(NamedTuple):
    """A sequence's part of a step that nobody planned: `num_tokens` tokens, the first of them at position `start`."""

    start: int
    num_tokens: int
    samples: bool = True


@dataclass(frozen=True)
class StepShape:
    """The sums of one step.

    `sequences` compute `tokens`, and `samples` of them draw a token. Of the sequences, `singles` compute one token: a
    query each, of which all together see `keys` keys, its own token's included, or `window_keys` where a layer has a
    sliding window. `chunks` are the others, as (start, num_tokens). `swapped_blocks` go to the host or come from it;
    `copied_blocks` are copied or moved within the device.
    """

    sequences: int
    tokens: int
    samples: int
    singles: int = 0
    keys: int = 0
    window_keys: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    swapped_blocks: int = 0
    copied_blocks: int = 0

    @classmethod
    def of(cls, items: Sequence[Scheduled], transfers: Iterable[Transfer] = (), window: int | None = None) -> StepShape:
        """Add up the items and the transfers of a plan; `window` is the model's sliding window, if it has one.

        Forks of a sequence, which draw their first tokens from its logits, are not counted.
        """
        # A simulation does this in each step for hundreds of sequences: one loop, and nothing called in it.
        tokens = samples = singles = keys = 0
        chunks: list[tuple[int, int]] = []
        for item in items:
            count = item.num_tokens
            if count == 1:
                singles += 1
                keys += item.start
            else:
                chunks.append((item.start, count))
                tokens += count
            samples += item.samples
        keys += singles
        seen = keys if window is None else sum(min(i.start + 1, window) for i in items if i.num_tokens == 1)
        swapped = copied = 0
        for transfer in transfers:
            if transfer.kind in ("swap_out", "swap_in"):
                swapped += len(transfer.pairs)
            else:
                copied += len(transfer.pairs)
        return cls(len(items), tokens + singles, samples, singles, keys, seen, tuple(chunks), swapped, copied)
