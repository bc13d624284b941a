"""How busy a GPU's workers are in a decode step, by the rule that cuts the keys: what batch invariance costs, modelled.

Arithmetic alone: pieces of work, dealt out in waves to workers that all take equally long. Nothing is measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from vllm_teach.attention.split_kv import choose_num_splits
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

ONE, FIXED, CHOSEN = "never split", "parts of a fixed size", "as the batch needs"
_LOOKS = {CHOSEN: ("o", "measured"), FIXED: ("s", "sdpa"), ONE: ("D", "limit")}


@dataclass(frozen=True)
class BusyWorkers:
    """For each rule and batch: how many parts the keys of a sequence are cut into, and the share of workers at work."""

    batches: tuple[int, ...]
    splits: dict[str, tuple[int, ...]]
    share: dict[str, tuple[float, ...]]

    def at(self, rule: str, batch: int) -> float:
        """The share of busy workers of one rule at one batch."""
        return self.share[rule][self.batches.index(batch)]

    def keeps_its_order(self, rule: str) -> bool:
        """Whether a sequence is cut into the same parts whatever batch it is in: then its bits can stay the same."""
        return len(set(self.splits[rule])) == 1


def busy_workers(batches: Sequence[int], kv_len: int, kv_heads: int, workers: int, part: int) -> BusyWorkers:
    """Cut `kv_len` keys by three rules: never, into parts of `part` keys, and by FlashAttention 2's rule.

    Raises InvalidArgumentError for sizes below 1.
    """
    for name, value in (("kv_len", kv_len), ("kv_heads", kv_heads), ("workers", workers), ("part", part)):
        if value < 1:
            raise InvalidArgumentError(f"{name}={value} is no size: use 1 or more.")
    splits = {
        CHOSEN: tuple(choose_num_splits(batch, kv_heads, 1, kv_len, workers) for batch in batches),
        FIXED: (math.ceil(kv_len / part),) * len(batches),
        ONE: (1,) * len(batches),
    }
    share = {
        rule: tuple(_share(batch * kv_heads * parts, workers) for batch, parts in zip(batches, counts, strict=True))
        for rule, counts in splits.items()
    }
    return BusyWorkers(tuple(batches), splits, share)


def _share(pieces: int, workers: int) -> float:
    """The share of workers at work: pieces over the places in all waves, the last of which may be nearly empty."""
    return pieces / (math.ceil(pieces / workers) * workers)


def draw_busy_workers(ax: Axes, data: BusyWorkers) -> None:
    """Draw a line per rule, the batch on a logarithmic axis; changes `ax`."""
    for rule, (marker, concept) in _LOOKS.items():
        ax.plot(data.batches, data.share[rule], f"{marker}-", color=style.colour(concept), label=rule)
    style.label_axis(ax, "x", "batch", unit="sequences", kind="tokens", log=2, ticks=data.batches)
    style.label_axis(ax, "y", "share of workers that have work", ticks=(0, 0.25, 0.5, 0.75, 1))
    ax.set_ylim(0, 1.04)
    ax.legend(loc="lower right")
