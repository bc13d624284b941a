"""Attention over the tiles that a pattern leaves: a program reads a list of key tiles, and visits no other.

The cost follows the number of visited tiles. `TileLists` holds them: for each tile of queries first the FULL tiles,
which need no mask, then the PARTIAL ones, each with the index of its mask; EMPTY tiles are not in it. FlexAttention's
BlockMask has the same two lists; `vllm_teach.attention.patterns` makes the tiles of any pattern.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_teach.errors import InvalidArgumentError

from . import tuning
from .problem import Options, Problem
from .tile_math import (
    LN2,
    load_tile,
    modify_scores,
    online_update,
    store_tile,
)


class TileLists(NamedTuple):
    """The tiles of keys to visit for each tile of queries, on the device of q.

    Those of query tile i are entries starts[i] to before starts[i + 1] of `k_tile`; the ones before full_ends[i] are
    FULL. `mask_index` has, for each PARTIAL entry, which of `masks` cuts it.

    - `starts`: int32 `[q_tiles + 1]`; `full_ends`: int32 `[q_tiles]`; `k_tile`, `mask_index`: int32 `[entries]`.
    - `masks`: uint8 `[num_masks, tile_q, tile_k]`, 1 where the pair is visible; tile_q and tile_k are the kernel's.
    """

    starts: torch.Tensor
    full_ends: torch.Tensor
    k_tile: torch.Tensor
    mask_index: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def of(
        cls,
        row_ptr: torch.Tensor,
        k_tile: torch.Tensor,
        full: torch.Tensor,
        mask_index: torch.Tensor,
        masks: torch.Tensor,
        device: torch.device,
    ) -> "TileLists":
        """Put the FULL entries of each row, those where the bool `full` is True, before the others; keep their order.

        Row i's entries are row_ptr[i] to before row_ptr[i + 1]; the tensors are those of `patterns.tile_csr`.
        """
        counts = row_ptr[1:] - row_ptr[:-1]
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)  # [entries], the row of each
        order = torch.argsort(2 * rows + (~full).int(), stable=True)
        full_ends = row_ptr[:-1] + torch.bincount(rows[full], minlength=len(counts))
        lists = (row_ptr.int(), full_ends.int(), k_tile[order].int(), mask_index[order].int(), masks)
        return cls(*(x.to(device).contiguous() for x in lists))


def block_sparse_spec(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention for one head, q `[q_len, head_dim]`, k and v `[kv_len, head_dim]`, under a mask.

    `visible` is bool `[q_len, kv_len]`; what the tile lists say is the same mask, cut into tiles.
    """
    scores = (q.float() @ k.float().T * scale).masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=1).nan_to_num(0.0)  # softmax over nothing is NaN
    return (probs @ v.float()).to(q.dtype)


@triton.jit(do_not_specialize=["q_heads", "group", "total_q", "max_q_len", "max_kv_len"])
def block_sparse_forward_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    full_ends_ptr: tl.tensor,
    k_tile_ptr: tl.tensor,
    mask_index_ptr: tl.tensor,
    masks_ptr: tl.tensor,
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
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
) -> None:
    """Write out `[total_q, q_heads, HEAD_DIM]` and lse float32 `[q_heads, total_q]` of sequences of equal length."""
    tiles = tl.cdiv(max_q_len, TILE_Q)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    sequence, head = batch_head // q_heads, batch_head % q_heads
    q_first, k_first = sequence.to(tl.int64) * max_q_len, sequence.to(tl.int64) * max_kv_len
    k_base = k_ptr + k_first * k_row + (head // group).to(tl.int64) * k_head
    v_base = v_ptr + k_first * v_row + (head // group).to(tl.int64) * v_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch_head)
    rows = tile * TILE_Q + tl.arange(0, TILE_Q)
    in_tile = tl.arange(0, TILE_Q)[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :]  # a pair's place in its mask
    q = load_tile(
        q_ptr + q_first * q_row + head.to(tl.int64) * q_head, rows, q_row, max_q_len, HEAD_DIM, DIM, True
    )  # [TILE_Q, DIM]

    acc = tl.zeros([TILE_Q, DIM], dtype=tl.float32)
    m = tl.full([TILE_Q], float("-inf"), dtype=tl.float32)
    l = tl.zeros([TILE_Q], dtype=tl.float32)  # noqa: E741
    begin, full_end, end = (
        tl.load(starts_ptr + tile),
        tl.load(full_ends_ptr + tile),
        tl.load(starts_ptr + tile + 1),
    )
    for partial in tl.static_range(2):
        first = full_end if partial else begin
        last = end if partial else full_end
        for entry in range(first, last):
            keys = tl.load(k_tile_ptr + entry) * TILE_K + tl.arange(0, TILE_K)
            k = load_tile(k_base, keys, k_row, max_kv_len, HEAD_DIM, DIM, True)  # [TILE_K, DIM]
            product = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_Q, TILE_K]
            scores = modify_scores(
                product, scale, softcap, slope, rows[:, None], keys[None, :], max_kv_len - max_q_len, SOFTCAP, ALIBI
            )
            visible = (keys < max_kv_len)[None, :]
            if partial:
                mask = masks_ptr + tl.load(mask_index_ptr + entry).to(tl.int64) * (TILE_Q * TILE_K)
                visible &= tl.load(mask + in_tile) != 0
            scores = tl.where(visible, scores, float("-inf"))
            m, l, weights, decay = online_update(m, l, scores)  # noqa: E741
            v = load_tile(v_base, keys, v_row, max_kv_len, HEAD_DIM, DIM, True)  # [TILE_K, DIM]
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    denominator = tl.where(l == 0.0, 1.0, l)
    out_base = out_ptr + (q_first * q_heads + head) * HEAD_DIM
    store_tile(out_base, acc / denominator[:, None], rows, q_heads * HEAD_DIM, max_q_len, HEAD_DIM, DIM)
    lse_base = lse_ptr + head.to(tl.int64) * total_q + q_first
    tl.store(lse_base + rows, (m + tl.log2(l)) * LN2, mask=rows < max_q_len)


def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, options: Options | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of attention over the tiles in `lists`, the same ones for every batch and head.

    Shapes: q and out `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`, lse float32
    `[batch, q_heads, q_len]`. Of `options`, scale, softcap and slopes count; there is no gradient. A row that sees no
    key gives 0 and -inf.

    Raises InvalidArgumentError for tensors that the kernel cannot take, a window or dropout among the options, and
    lists that are not of q's length and device. The indices in the lists are not read here and must fit k.
    """
    options = options or Options()
    problem = Problem.of(q, k, v, options)
    _check(problem, lists)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.q_heads, len(problem.q), dtype=torch.float32, device=q.device)
    tile_q, tile_k = lists.masks.shape[1:]
    if out.numel() > 0:
        tile = next((t for t in tile_candidates(q) if (t.q, t.k) == (tile_q, tile_k)), tuning.Tile(tile_q, tile_k))
        names = block_sparse_forward_kernel.arg_names
        arguments = {name: value for name, value in problem.arguments().items() if name in names}
        grid = ((len(lists.starts) - 1) * problem.batch * problem.q_heads,)
        with torch.cuda.device_of(q):
            block_sparse_forward_kernel[grid](
                out_ptr=out,
                lse_ptr=lse,
                starts_ptr=lists.starts,
                full_ends_ptr=lists.full_ends,
                k_tile_ptr=lists.k_tile,
                mask_index_ptr=lists.mask_index,
                masks_ptr=lists.masks,
                **arguments,
                **tile.launch(),
            )
    return out, lse.view(problem.q_heads, problem.batch, problem.q_len).transpose(0, 1)


def tile_candidates(q: torch.Tensor) -> tuple[tuning.Tile, ...]:
    """Return the tiles that are worth making lists of for such a q, the default first."""
    return tuning.candidates("block_sparse", q.shape[-1], q.dtype)


def _check(problem: Problem, lists: TileLists) -> None:
    options = problem.options
    if problem.banded or options.dropout_p > 0:
        raise InvalidArgumentError(
            f"options have left={options.left}, right={options.right}, dropout_p={options.dropout_p}; the tile lists "
            "hold every mask here, and there is no dropout."
        )
    q_tiles = triton.cdiv(problem.q_len, lists.masks.shape[1])
    if len(lists.starts) != q_tiles + 1 or lists.starts.device != problem.q.device:
        raise InvalidArgumentError(
            f"lists are of {len(lists.starts) - 1} tiles of {lists.masks.shape[1]} queries on {lists.starts.device}, "
            f"and q has {problem.q_len} queries on {problem.q.device}; make the lists for this q."
        )
