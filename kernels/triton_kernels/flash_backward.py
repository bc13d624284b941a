"""FlashAttention's backward pass: the probabilities are computed again from q, k and lse, tile by tile.

Algorithm 2 of FlashAttention-2 (arXiv 2307.08691, section 3.1), as two kernels and not one. One program of the first
holds a tile of keys, goes over all queries that see it and sums dk and dv; one of the second holds a tile of queries
and sums dq. Each sum belongs to one program, so no atomic addition is needed and the same input gives the same bits;
the price is that the scores are computed twice. `backward_math.flash_backward_spec` says what they compute.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from . import tuning
from .backward_math import Gradients, delta_kernel, score_gradients
from .flash_forward import NOT_SPECIALIZED, flash_forward, key_runs
from .problem import Problem
from .tile_math import load_tile, padded, sequence_bounds, store_tile


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_backward_keys_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
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
    """Write dk and dv `[total_k, kv_heads, HEAD_DIM]`, contiguous as dout is; tiles of scores are `[keys, queries]`."""
    tiles = tl.cdiv(max_kv_len, TILE_K)
    k_start = tl.program_id(0) % tiles * TILE_K
    kv_heads = q_heads // group
    sequence, kv_head = tl.program_id(0) // tiles // kv_heads, tl.program_id(0) // tiles % kv_heads
    q_first, q_len = sequence_bounds(cu_q_ptr, sequence, max_q_len, VARLEN)
    k_first, kv_len = sequence_bounds(cu_k_ptr, sequence, max_kv_len, VARLEN)
    if k_start >= kv_len:
        return

    offset = kv_len - q_len
    keys = k_start + tl.arange(0, TILE_K)
    k_base = k_ptr + k_first * k_row + kv_head.to(tl.int64) * k_head
    v_base = v_ptr + k_first * v_row + kv_head.to(tl.int64) * v_head
    k = load_tile(k_base, keys, k_row, kv_len, HEAD_DIM, DIM, True)  # [TILE_K, DIM]
    v = load_tile(v_base, keys, v_row, kv_len, HEAD_DIM, DIM, True)  # [TILE_K, DIM]
    dk = tl.zeros([TILE_K, DIM], dtype=tl.float32)
    dv = tl.zeros([TILE_K, DIM], dtype=tl.float32)
    begin = 0  # the queries that see one of these keys
    end = q_len
    if RIGHT:
        begin = tl.maximum(k_start - right - offset, 0) // TILE_Q * TILE_Q
    if LEFT:
        end = tl.minimum(tl.minimum(k_start + TILE_K, kv_len) + left - offset, q_len)
    for member in range(0, group):  # the query heads that share this key head
        head = kv_head * group + member
        batch_head = sequence * q_heads + head
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + batch_head)
        q_base = q_ptr + q_first * q_row + head.to(tl.int64) * q_head
        dout_base = dout_ptr + (q_first * q_heads + head) * HEAD_DIM
        row_base = head.to(tl.int64) * total_q + q_first
        for start in range(begin, end, TILE_Q):
            rows = start + tl.arange(0, TILE_Q)
            q = load_tile(q_base, rows, q_row, q_len, HEAD_DIM, DIM, True)  # [TILE_Q, DIM]
            dout = load_tile(dout_base, rows, q_heads * HEAD_DIM, q_len, HEAD_DIM, DIM, True)  # [TILE_Q, DIM]
            lse = tl.load(lse_ptr + row_base + rows, mask=rows < q_len, other=0.0)
            delta = tl.load(delta_ptr + row_base + rows, mask=rows < q_len, other=0.0)
            product = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [TILE_K, TILE_Q]
            dprobs = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # [TILE_K, TILE_Q]
            probs, dscores = score_gradients(
                product, dprobs, lse[None, :], delta[None, :], rows[None, :], keys[:, None], q_len, kv_len, batch_head,
                slope, scale, softcap, left, right, seed_low, seed_high, threshold, keep_scale, LEFT, RIGHT, SOFTCAP,
                ALIBI, DROPOUT,
            )  # fmt: skip
            dv = tl.dot(probs.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    base = (k_first * kv_heads + kv_head) * HEAD_DIM
    store_tile(dk_ptr + base, dk * scale, keys, kv_heads * HEAD_DIM, kv_len, HEAD_DIM, DIM)
    store_tile(dv_ptr + base, dv, keys, kv_heads * HEAD_DIM, kv_len, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_backward_queries_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dq_ptr: tl.tensor,
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
    """Write dq `[total_q, q_heads, HEAD_DIM]`, contiguous as dout is."""
    tiles = tl.cdiv(max_q_len, TILE_Q)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    sequence, head = batch_head // q_heads, batch_head % q_heads
    q_first, q_len = sequence_bounds(cu_q_ptr, sequence, max_q_len, VARLEN)
    k_first, kv_len = sequence_bounds(cu_k_ptr, sequence, max_kv_len, VARLEN)
    q_start = tile * TILE_Q
    if q_start >= q_len:
        return

    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch_head)
    rows = q_start + tl.arange(0, TILE_Q)
    q_base = q_ptr + q_first * q_row + head.to(tl.int64) * q_head
    k_base = k_ptr + k_first * k_row + (head // group).to(tl.int64) * k_head
    v_base = v_ptr + k_first * v_row + (head // group).to(tl.int64) * v_head
    base = (q_first * q_heads + head) * HEAD_DIM
    row_base = head.to(tl.int64) * total_q + q_first
    q = load_tile(q_base, rows, q_row, q_len, HEAD_DIM, DIM, True)  # [TILE_Q, DIM]
    dout = load_tile(dout_ptr + base, rows, q_heads * HEAD_DIM, q_len, HEAD_DIM, DIM, True)  # [TILE_Q, DIM]
    lse = tl.load(lse_ptr + row_base + rows, mask=rows < q_len, other=0.0)
    delta = tl.load(delta_ptr + row_base + rows, mask=rows < q_len, other=0.0)
    dq = tl.zeros([TILE_Q, DIM], dtype=tl.float32)
    begin, _full_begin, _full_end, end = key_runs(q_start, q_len, kv_len, left, right, TILE_Q, TILE_K, LEFT, RIGHT)
    for start in range(begin, end, TILE_K):
        keys = start + tl.arange(0, TILE_K)
        k = load_tile(k_base, keys, k_row, kv_len, HEAD_DIM, DIM, True)  # [TILE_K, DIM]
        v = load_tile(v_base, keys, v_row, kv_len, HEAD_DIM, DIM, True)  # [TILE_K, DIM]
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_Q, TILE_K]
        dprobs = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # [TILE_Q, TILE_K]
        _dropped, dscores = score_gradients(
            product, dprobs, lse[:, None], delta[:, None], rows[:, None], keys[None, :], q_len, kv_len, batch_head,
            slope, scale, softcap, left, right, seed_low, seed_high, threshold, keep_scale, LEFT, RIGHT, SOFTCAP,
            ALIBI, DROPOUT,
        )  # fmt: skip
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + base, dq * scale, rows, q_heads * HEAD_DIM, q_len, HEAD_DIM, DIM)


def flash_backward(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    key_tile: tuning.Tile | None = None,
    query_tile: tuning.Tile | None = None,
) -> Gradients:
    """Return (dq, dk, dv), flat as q, k and v are, from the forward pass's `out` and `lse` and the gradient `dout`.

    `key_tile` is the tile of the kernel that computes dk and dv, `query_tile` of the one for dq; None: the tuned or
    default ones. A query that sees no key gives and gets no gradient.
    """
    if len(problem.q) == 0 or len(problem.k) == 0:
        dq, dk, dv = (x.new_zeros(x.shape) for x in (problem.q, problem.k, problem.v))
        return dq, dk, dv
    inputs = _inputs(problem, out, lse, dout)
    key_tile = key_tile or tuning.choose("backward_keys", problem, _timed(_key_gradients))
    query_tile = query_tile or tuning.choose("backward_queries", problem, _timed(_query_gradients))
    dq = _query_gradients(problem, inputs, query_tile)
    return dq, *_key_gradients(problem, inputs, key_tile)


def _inputs(problem: Problem, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> dict[str, Any]:
    """Compute delta and return the arguments that both kernels take."""
    dout = dout.resolve_neg().contiguous()
    delta = torch.empty_like(lse)
    sizes = {"HEAD_DIM": problem.head_dim, "DIM": padded(problem.head_dim), "TILE_Q": 64}
    with torch.cuda.device_of(out):
        delta_kernel[(triton.cdiv(len(out), 64), problem.q_heads)](out, dout, delta, len(out), problem.q_heads, **sizes)
    return problem.arguments() | {"dout_ptr": dout, "lse_ptr": lse, "delta_ptr": delta}


def _key_gradients(problem: Problem, inputs: dict[str, Any], tile: tuning.Tile) -> tuple[torch.Tensor, torch.Tensor]:
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (problem.k, problem.v))
    grid = (triton.cdiv(problem.kv_len, tile.k) * problem.batch * problem.kv_heads,)
    with torch.cuda.device_of(dk):
        flash_backward_keys_kernel[grid](dk_ptr=dk, dv_ptr=dv, **inputs, **tile.launch())
    return dk, dv


def _query_gradients(problem: Problem, inputs: dict[str, Any], tile: tuning.Tile) -> torch.Tensor:
    dq = torch.empty(problem.q.shape, dtype=problem.q.dtype, device=problem.q.device)
    grid = (triton.cdiv(problem.q_len, tile.q) * problem.batch * problem.q_heads,)
    with torch.cuda.device_of(dq):
        flash_backward_queries_kernel[grid](dq_ptr=dq, **inputs, **tile.launch())
    return dq


def _timed(
    compute: Callable[[Problem, dict[str, Any], tuning.Tile], object],
) -> Callable[[Problem], Callable[[tuning.Tile], object]]:
    """Return what prepares a problem for `tuning.choose`: the forward pass and delta stay out of the measurement."""

    def prepare(problem: Problem) -> Callable[[tuning.Tile], object]:
        out, lse = flash_forward(problem)
        inputs = _inputs(problem, out, lse, out)  # any upstream gradient takes the same time
        return lambda tile: compute(problem, inputs, tile)

    return prepare
