"""Softmax-weighted sums computed one tile of keys at a time, never holding a whole row of scores.

For one query with scores s_1 … s_n and values v_1 … v_n, keep three running quantities over the keys seen so far:

    m   = max s_j                          the largest score
    l   = sum exp(s_j - m)                 the softmax's denominator, relative to m
    acc = sum exp(s_j - m) * v_j           its numerator, relative to m

A new tile may raise m. What was summed relative to the old m is then multiplied by exp(m_old - m_new), and is right
again. Two states over different keys merge by the same rule, in any order and grouping. At the end out = acc / l and
log-sum-exp = m + log l.

Sources: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3 (the m, l recurrence); FlashAttention, arXiv 2205.14135,
section 3.1 (with the accumulator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SoftmaxState:
    """The running state of many rows (queries) at once.

    Shapes: `m` and `l` are `[..., rows]`, `acc` is `[..., rows, value_dim]`; all of one dtype. Invariant: a row that
    has seen no key has m = -inf, l = 0, acc = 0; any other row has l >= 1, as its largest score adds exp(0).
    """

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741  the papers' name
    acc: torch.Tensor

    @classmethod
    def empty(
        cls,
        rows: Sequence[int],
        value_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SoftmaxState:
        """Return the state of rows that have seen no key; `rows` is the shape of m, such as `[batch, heads, q_len]`."""
        return cls(
            m=torch.full(tuple(rows), float("-inf"), dtype=dtype, device=device),
            l=torch.zeros(tuple(rows), dtype=dtype, device=device),
            acc=torch.zeros((*rows, value_dim), dtype=dtype, device=device),
        )


def update(
    state: SoftmaxState, scores_tile: torch.Tensor, value_tile: torch.Tensor, keep: torch.Tensor | None = None
) -> SoftmaxState:
    """Return `state` after one more tile of keys; the arguments are not changed.

    `scores_tile` is `[..., rows, tile]` (-inf where a row may not see a key) and `value_tile` is
    `[..., tile, value_dim]`. Both are computed with in the state's dtype, whatever their own. `keep` is dropout's bool
    mask, shaped like the scores: what it drops is left out of acc, and stays in l.
    """
    if scores_tile.shape[-1] == 0:
        return state  # the largest of no scores does not exist
    scores = scores_tile.to(state.m.dtype)  # [..., rows, tile]
    m = torch.maximum(state.m, scores.amax(dim=-1))  # [..., rows]
    shift = finite(m)
    p = torch.exp(scores - shift[..., None])  # [..., rows, tile], each at most 1
    rescale = torch.exp(state.m - shift)  # [..., rows]; 0 where the row had seen nothing
    kept = p if keep is None else p * keep
    return SoftmaxState(
        m=m,
        l=state.l * rescale + p.sum(dim=-1),
        acc=state.acc * rescale[..., None] + kept @ value_tile.to(p.dtype),
    )


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Return the state of rows that have seen the keys of `a` and the keys of `b`, which must have equal shapes.

    Associative and commutative up to rounding; the empty state is neutral.
    """
    m = torch.maximum(a.m, b.m)  # [..., rows]
    shift = finite(m)
    weight_a, weight_b = torch.exp(a.m - shift), torch.exp(b.m - shift)  # one of them is 1
    return SoftmaxState(
        m=m,
        l=a.l * weight_a + b.l * weight_b,
        acc=a.acc * weight_a[..., None] + b.acc * weight_b[..., None],
    )


def finish(state: SoftmaxState) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out `[..., rows, value_dim]`, lse `[..., rows]`); a row that has seen no key gives 0 and -inf."""
    denominator = torch.where(state.l == 0, 1, state.l)  # acc is 0 there, and 0 / 1 is the 0 we want
    out = state.acc / denominator[..., None]
    lse = state.m + torch.log(state.l)  # -inf + log(0) = -inf
    return out, lse


def finite(m: torch.Tensor) -> torch.Tensor:
    """Replace -inf by 0: with no key seen, exp(-inf - 0) = 0 is right, and exp(-inf - -inf) would be NaN."""
    return torch.where(m == float("-inf"), 0, m)
