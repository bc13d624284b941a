"""Which blocks no later query sees, from how a pattern is written: arithmetic on its numbers, without looking at pairs.

Causal masks, windows and sinks only ever forget: of the keys before position n, a query behind n sees none that the
query at n does not see. `&` and `|` keep that. So the query at n alone decides, and it sees a few runs of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_teach.attention.patterns import Pattern

# Keys from the first to before the second.
_Runs = list[tuple[int, int]]


def unseen_blocks(pattern: Pattern | None, num_tokens: int, block_size: int) -> list[int]:
    """Return the logical blocks, all full, that no query at position `num_tokens` or behind sees; in ascending order.

    Exact for bands, `GlobalTokens` and what `&` and `|` make of them, under a causal mask besides. Of other patterns
    nothing is known: no block is returned.
    """
    runs = _seen(pattern, num_tokens)
    if runs is None:
        return []
    num_full = num_tokens // block_size
    kept = {
        block
        for first, end in runs
        for block in range(first // block_size, min(num_full, -(-end // block_size)))
        if first < end
    }
    return [block for block in range(num_full) if block not in kept]


def _seen(pattern: Pattern | None, position: int) -> _Runs | None:
    """Return which keys before `position` the query there sees; None when a later one might see others."""
    from vllm_teach.attention.patterns import GlobalTokens, as_band
    from vllm_teach.attention.patterns.base import Both, Either

    match pattern:
        case GlobalTokens(n, symmetric):
            # A symmetric one's first queries see everything.
            return [(0, position if symmetric and position < n else min(n, position))]
        case Both(a, b) | Either(a, b):
            first, second = _seen(a, position), _seen(b, position)
            if first is None or second is None:
                return None
            if isinstance(pattern, Either):
                return first + second
            return [(max(p[0], q[0]), min(p[1], q[1])) for p in first for q in second]
    band = as_band(pattern)
    if band is None:
        return None
    left = band[0]
    return [(0 if left == -1 else max(0, position - left), position)]
