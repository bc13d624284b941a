"""The two kinds of memory that serve no one: held and not used (internal), free and not usable (external)."""

from __future__ import annotations

from collections.abc import Iterable


def consecutive_runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs (first block, length) of consecutive numbers in `blocks`, each as long as possible, in order."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and block == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def external_fragmentation(free: Iterable[int]) -> float:
    """Return 1 - longest run of free blocks / free blocks, 0 to 1: 0 if all that is free lies together.

    It says how much of the free memory a request for one run could not get. Where blocks need not lie together it
    costs nothing, which is the point of paging (Kwon et al. 2023, section 4.1).
    """
    lengths = [length for _, length in consecutive_runs(free)]
    return 1 - max(lengths) / sum(lengths) if lengths else 0.0


def internal_fragmentation(tokens_stored: int, slots_held: int) -> float:
    """Return the share of the slots held that no token is in, 0 to 1: reserved for later, or rounded up to."""
    return 1 - tokens_stored / slots_held if slots_held else 0.0
