"""What all attention kernels do with one tile of scores: load, softcap, ALiBi, dropout, the online softmax.

Scores are kept in units of log 2, score · log2(e), so that exp2, which a GPU has an instruction for, replaces exp.
`rows` and `keys` are index vectors that broadcast against each other, `[rows, 1]` and `[1, keys]`: a kernel that works
on transposed tiles passes them the other way round.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_bounds(starts_ptr: tl.tensor, sequence: tl.tensor, longest: tl.tensor, VARLEN: tl.constexpr) -> tuple:
    """Return (first row, length) of a sequence, the row in int64: offsets may pass 2**31 elements."""
    if VARLEN:
        first = tl.load(starts_ptr + sequence)
        length = tl.load(starts_ptr + sequence + 1) - first
        return first.to(tl.int64), length
    return sequence.to(tl.int64) * longest, longest


@triton.jit
def load_tile(
    base: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    end: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SOME_ROWS: tl.constexpr,
) -> tl.tensor:
    """Return `[rows, DIM]` from `base`: 0 from column HEAD_DIM on and, with SOME_ROWS, from row `end` on."""
    dims = tl.arange(0, DIM)
    offsets = rows.to(tl.int64)[:, None] * row_stride + dims[None, :]  # may pass 2**31 elements
    if SOME_ROWS:
        return tl.load(base + offsets, mask=(rows < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM != DIM:
        return tl.load(base + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(base + offsets)


@triton.jit
def store_tile(
    base: tl.tensor,
    value: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    end: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Write `value` `[rows, DIM]` in the dtype behind `base`, up to row `end` and column HEAD_DIM."""
    dims = tl.arange(0, DIM)
    offsets = rows.to(tl.int64)[:, None] * row_stride + dims[None, :]
    there = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=there)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh(x) to a few units in the last place: its series near 0, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return tl.where(square < 0.0225, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def modify_scores(
    product: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    slope: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    offset: tl.tensor,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
) -> tl.tensor:
    """Return q k^T scaled, capped and biased, in units of log 2. `offset` is kv_len - q_len.

    In PyTorch (attention.scores.modify_scores):
        scores = product * scale
        scores = softcap * torch.tanh(scores / softcap)  # with SOFTCAP
        scores = scores - slope * (rows + offset - keys).abs()  # with ALIBI
        return scores * log2(e)
    """
    scores = tanh(product * (scale / softcap)) * (softcap * LOG2E) if SOFTCAP else product * (scale * LOG2E)
    if ALIBI:
        scores -= (slope * LOG2E) * tl.abs(rows + offset - keys).to(tl.float32)
    return scores


@triton.jit
def in_band(
    rows: tl.tensor,
    keys: tl.tensor,
    offset: tl.tensor,
    kv_len: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
) -> tl.tensor:
    """Return where a key exists and lies at most `left` before and `right` behind its query's position."""
    visible = keys < kv_len
    if LEFT:
        visible &= keys >= rows + offset - left
    if RIGHT:
        visible &= keys <= rows + offset + right
    return visible


@triton.jit
def online_update(m: tl.tensor, l: tl.tensor, scores: tl.tensor) -> tuple:  # noqa: E741
    """Return (m, l, weights, decay): the online softmax's statistics after one more tile, `[rows]` each.

    `weights` are exp2(scores - m); what was accumulated so far has to be multiplied by `decay`.
    """
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(m - shift)
    return m_new, l * decay + tl.sum(weights, axis=1), weights, decay


@triton.jit
def kept(
    rows: tl.tensor,
    keys: tl.tensor,
    batch_head: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    threshold: tl.tensor,
) -> tl.tensor:
    """Return where dropout keeps a pair: `vllm_teach.attention.dropout.keep_mask`, bit for bit.

    Philox4x32-10 with the counter (key, query, batch_head, 0) and the 64-bit seed as its key; the upper 24 bits of the
    first word are compared with `threshold`.
    """
    zero = (rows + keys).to(tl.uint32) * 0  # [rows, keys]
    key0, key1 = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    word, _, _, _ = tl.philox_impl(
        zero + keys.to(tl.uint32), zero + rows.to(tl.uint32), zero + batch_head.to(tl.uint32), zero, key0, key1
    )
    return (word >> 8).to(tl.int32) >= threshold


def seed_halves(seed: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits of `seed` as signed numbers, the form in which Triton takes an int32."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def padded(head_dim: int) -> int:
    """Return the power of two, at least 16, to which a tile's columns are padded: tl.dot takes nothing smaller."""
    return max(16, triton.next_power_of_2(head_dim))


def dot_precision(dtype: torch.dtype) -> str:
    """Return how tl.dot multiplies: float32 in full, as tensor cores' tf32 keeps only 10 bits of the mantissa."""
    return "ieee" if dtype == torch.float32 else "tf32"
