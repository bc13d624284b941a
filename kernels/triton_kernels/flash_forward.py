"""FlashAttention's forward pass: one program computes one tile of queries of one head, and no score leaves the chip.

Algorithm 1 of FlashAttention-2 (arXiv 2307.08691, section 3.1); `vllm_teach.attention.tiled` is the same loop in
PyTorch, and `flash_forward_spec` the function that both compute. The tiles of keys fall into three runs: those that the
window's left edge cuts, those that every query of the tile sees whole, which need no mask, and those that the causal
edge or the sequence's end cuts. Tiles outside these runs are not visited.
"""

import torch
import triton
import triton.language as tl

from . import tuning
from .problem import Problem
from .tile_math import (
    LN2,
    in_band,
    kept,
    load_tile,
    modify_scores,
    online_update,
    sequence_bounds,
    store_tile,
)

# A kernel is compiled again for a number that is 1 or a multiple of 16; not for these, which differ from call to call.
NOT_SPECIALIZED = [
    "q_heads",
    "group",
    "total_q",
    "max_q_len",
    "max_kv_len",
    "left",
    "right",
    "seed_low",
    "seed_high",
    "threshold",
]


def flash_forward_spec(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return softmax(q k^T * scale) v for one head, q `[q_len, head_dim]`, k and v `[kv_len, head_dim]`.

    With masks, softcap, ALiBi and dropout it is `vllm_teach.attention.naive_attention`.
    """
    scores = q.float() @ k.float().T * scale  # [q_len, kv_len]
    return (torch.softmax(scores, dim=1) @ v.float()).to(q.dtype)


@triton.jit
def key_runs(
    q_start: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
) -> tuple:
    """Return (begin, full_begin, full_end, end): the keys of the three runs; all but `end` are multiples of TILE_K."""
    offset = kv_len - q_len
    lowest = q_start + offset  # the positions of the tile's first and last query
    highest = tl.minimum(q_start + TILE_Q, q_len) - 1 + offset
    begin = 0
    full_begin = 0
    end = kv_len
    whole = kv_len  # from here on, not every query sees the key
    if RIGHT:
        end = tl.maximum(tl.minimum(kv_len, highest + right + 1), 0)
        whole = tl.maximum(tl.minimum(kv_len, lowest + right + 1), 0)
    if LEFT:
        begin = tl.maximum(lowest - left, 0) // TILE_K * TILE_K
        full_begin = tl.cdiv(tl.maximum(highest - left, 0), TILE_K) * TILE_K
        full_begin = tl.maximum(tl.minimum(full_begin, tl.cdiv(end, TILE_K) * TILE_K), begin)
    full_end = tl.maximum(whole // TILE_K * TILE_K, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def visit_keys(
    acc: tl.tensor,
    m: tl.tensor,
    l: tl.tensor,  # noqa: E741
    q: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    rows: tl.tensor,
    batch_head: tl.tensor,
    slope: tl.tensor,
    offset: tl.tensor,
    kv_len: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    threshold: tl.tensor,
    TILE_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple:
    """Carry the online softmax (acc, m, l) over the keys `first` to `last`; without MASKED all of them are visible."""
    for start in range(first, last, TILE_K):
        keys = start + tl.arange(0, TILE_K)
        k = load_tile(k_base, keys, k_row, kv_len, HEAD_DIM, DIM, MASKED)  # [TILE_K, DIM]
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_Q, TILE_K], float32
        scores = modify_scores(product, scale, softcap, slope, rows[:, None], keys[None, :], offset, SOFTCAP, ALIBI)
        if MASKED:
            visible = in_band(rows[:, None], keys[None, :], offset, kv_len, left, right, LEFT, RIGHT)
            scores = tl.where(visible, scores, float("-inf"))
        m, l, weights, decay = online_update(m, l, scores)  # noqa: E741
        if DROPOUT:  # l has all weights: the log-sum-exp does not see dropout
            keep = kept(rows[:, None], keys[None, :], batch_head, seed_low, seed_high, threshold)
            weights = tl.where(keep, weights, 0.0)
        v = load_tile(v_base, keys, v_row, kv_len, HEAD_DIM, DIM, MASKED)  # [TILE_K, DIM]
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, m, l


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_forward_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    cu_k_ptr: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    total_q: tl.tensor,
    max_q_len: tl.tensor,
    max_kv_len: tl.tensor,
    q_heads: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    threshold: tl.tensor,
    keep_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    """Write out `[total_q, q_heads, HEAD_DIM]` and lse float32 `[q_heads, total_q]`, both contiguous."""
    tiles = tl.cdiv(max_q_len, TILE_Q)
    tile = tiles - 1 - tl.program_id(0) % tiles  # the last tile has the most keys under a causal mask: it starts first
    batch_head = tl.program_id(0) // tiles
    sequence, head = batch_head // q_heads, batch_head % q_heads
    q_first, q_len = sequence_bounds(cu_q_ptr, sequence, max_q_len, VARLEN)
    k_first, kv_len = sequence_bounds(cu_k_ptr, sequence, max_kv_len, VARLEN)
    q_start = tile * TILE_Q
    if q_start >= q_len:  # a shorter sequence than the longest
        return

    q_base = q_ptr + q_first * q_row + head.to(tl.int64) * q_head
    k_base = k_ptr + k_first * k_row + (head // group).to(tl.int64) * k_head
    v_base = v_ptr + k_first * v_row + (head // group).to(tl.int64) * v_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch_head)
    rows = q_start + tl.arange(0, TILE_Q)
    q = load_tile(q_base, rows, q_row, q_len, HEAD_DIM, DIM, True)  # [TILE_Q, DIM]

    acc = tl.zeros([TILE_Q, DIM], dtype=tl.float32)
    m = tl.full([TILE_Q], float("-inf"), dtype=tl.float32)  # the largest score so far
    l = tl.zeros([TILE_Q], dtype=tl.float32)  # the sum of exp2(score - m) so far  # noqa: E741
    begin, full_begin, full_end, end = key_runs(q_start, q_len, kv_len, left, right, TILE_Q, TILE_K, LEFT, RIGHT)
    for run in tl.static_range(3):
        if run == 0:
            first, last = begin, full_begin
        elif run == 1:
            first, last = full_begin, full_end
        else:
            first, last = full_end, end
        if run > 0 or LEFT:
            acc, m, l = visit_keys(  # noqa: E741
                acc, m, l, q, k_base, v_base, k_row, v_row, first, last, rows, batch_head, slope, kv_len - q_len,
                kv_len, scale, softcap, left, right, seed_low, seed_high, threshold, TILE_K, HEAD_DIM, DIM, PRECISION,
                LEFT, RIGHT, SOFTCAP, ALIBI, DROPOUT, run != 1,
            )  # fmt: skip

    denominator = tl.where(l == 0.0, 1.0, l)  # 0 only for a row that sees no key, and then acc is 0, too
    if DROPOUT:
        acc *= keep_scale
    out_base = out_ptr + (q_first * q_heads + head) * HEAD_DIM
    store_tile(out_base, acc / denominator[:, None], rows, q_heads * HEAD_DIM, q_len, HEAD_DIM, DIM)
    lse_base = lse_ptr + head.to(tl.int64) * total_q + q_first
    tl.store(lse_base + rows, (m + tl.log2(l)) * LN2, mask=rows < q_len)


def flash_forward(problem: Problem, tile: tuning.Tile | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse): out `[total_q, q_heads, head_dim]` in q's dtype, lse float32 `[q_heads, total_q]`.

    `tile` is the tuned or default one for None. A row that sees no key gives 0 and -inf.
    """
    q = problem.q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.q_heads, len(q), dtype=torch.float32, device=q.device)
    if len(q) > 0:
        tile = tile or tuning.choose("forward", problem, lambda workload: lambda tile: flash_forward(workload, tile))
        grid = (triton.cdiv(problem.q_len, tile.q) * problem.batch * problem.q_heads,)
        with torch.cuda.device_of(q):  # Triton launches on the current device, which need not be q's
            flash_forward_kernel[grid](out_ptr=out, lse_ptr=lse, **problem.arguments(), **tile.launch())
    return out, lse
