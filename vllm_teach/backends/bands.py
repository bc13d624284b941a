"""The masks that libraries know by two numbers, what of them hides anything in a call, and the rows that see no key."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_teach.attention.patterns.band import as_band
from vllm_teach.attention.patterns.base import Pattern

Band = tuple[int, int]

CAUSAL: Band = (-1, 0)


def band_of(pattern: Pattern | None, q_len: int, kv_len: int) -> Band | None:
    """Return (left, right), how many keys before and after its own position a query sees; None if `pattern` is no band.

    -1 stands for all keys of that side, and is returned too for a limit that hides none of these lengths, or of
    shorter ones: one query is (-1, -1) under the causal mask, since it stands behind every key.
    """
    found = as_band(pattern)
    if found is None:
        return None
    left, right = found
    # The last query stands on the last key and looks back furthest; the first looks ahead furthest.
    return -1 if left >= kv_len - 1 else left, -1 if right >= q_len - 1 else right


def blind_rows(band: Band, q_len: int, kv_len: int) -> int:
    """Return how many of the first queries see no key under `band`: those too far before the first one.

    The last ones always see one, as no query stands behind the last key.
    """
    if kv_len == 0:
        return q_len
    right = band[1]
    return 0 if right == -1 else min(q_len, max(0, q_len - kv_len - right))


def attend_seeing_rows(
    attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blind: int
) -> torch.Tensor:
    """Call `attend` on all but the first `blind` rows of q `[batch, q_len, q_heads, head_dim]`; give those rows 0.

    Softmax over nothing is 0/0, which libraries answer with NaN. `blind_rows` counts such rows.
    """
    if blind == q.shape[1] or q.shape[0] == 0:
        return nothing_seen(q, k, v)
    if blind == 0:
        return attend(q)
    out = torch.zeros_like(q)
    out[:, blind:] = attend(q[:, blind:])
    return out


def nothing_seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the output of queries without a key: 0 of q's shape, which autograd knows to depend on all three."""
    return torch.zeros_like(q) + (q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum())
