"""FlashAttention's forward pass: attention without the score matrix.

Algorithm 1 of FlashAttention-2 (arXiv 2307.08691, section 3.1): for each tile of queries, go over the tiles of keys,
and carry the online softmax along. Only one tile of scores exists at a time, so memory grows with n and not with n².
"""

import torch

from vllm_teach import counters
from vllm_teach.attention.online_softmax import SoftmaxState, finish, update
from vllm_teach.attention.shapes import AttentionShape, check_qkv, check_scale
from vllm_teach.attention.traffic import q_tile_step, tile_pair_step, tile_pairs


def flash_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_q: int = 128,
    tile_k: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of softmax(q k^T * scale) v, computed tile by tile.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`, out like q, lse
    `[batch, q_heads, q_len]`. Lengths need not be multiples of the tiles. `causal` hides key j from query i when
    j > i + kv_len - q_len; a row that sees no key gives 0 and -inf. Scores, statistics, accumulator and lse are
    float32 for float16, bfloat16 and float32 input, and float64 for float64 input; out has q's dtype.
    A NaN in v that the mask hides spreads (0 · NaN is NaN) to the other rows of a tile pair that is
    visited, but not into a tile pair that is skipped.

    Raises InvalidArgumentError when the tensors do not fit together or a tile is not positive.
    """
    shape = check_qkv(q, k, v)
    scale = check_scale(scale, shape.head_dim)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(shape.batch, shape.q_heads, shape.q_len, dtype=dtype, device=q.device)
    for (q_start, q_end), k_tiles in tile_pairs(shape, causal, tile_q, tile_k):
        q_tile = _stack_groups(q[:, q_start:q_end], shape)  # [batch, kv_heads, group * rows, head_dim]
        q_tile = q_tile.to(dtype) * scale
        state = SoftmaxState.empty(q_tile.shape[:-1], shape.head_dim, dtype=dtype, device=q.device)

        for k_start, k_end in k_tiles:
            k_tile = k[:, k_start:k_end].transpose(1, 2).to(dtype)  # [batch, kv_heads, keys, head_dim]
            v_tile = v[:, k_start:k_end].transpose(1, 2).to(dtype)  # [batch, kv_heads, keys, head_dim]
            scores = q_tile @ k_tile.transpose(-2, -1)  # [batch, kv_heads, group * rows, keys]
            # The tile needs a mask only if its first query misses its last key: below the diagonal none is needed.
            if causal and k_end - 1 > q_start + shape.causal_offset:
                scores.masked_fill_(_beyond_diagonal(q_start, q_end, k_start, k_end, shape, q.device), float("-inf"))
            state = update(state, scores, v_tile)
            _report_pair(shape, q.element_size(), q_end - q_start, k_end - k_start, tile_q, tile_k)

        out_tile, lse_tile = finish(state)
        out[:, q_start:q_end] = _unstack_groups(out_tile, shape)  # rounds to q's dtype, once
        lse[:, :, q_start:q_end] = lse_tile.reshape(shape.batch, shape.q_heads, q_end - q_start)
        _report_q_tile(shape, q.element_size(), q_end - q_start)
    return out, lse


def _stack_groups(q_tile: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Put the query heads that share a key head under each other, so that no key is ever repeated.

    `[batch, rows, q_heads, head_dim]` -> `[batch, kv_heads, group * rows, head_dim]`; the heads of a group follow one
    another, each with all its rows.
    """
    split = q_tile.unflatten(2, (shape.kv_heads, shape.group))  # [batch, rows, kv_heads, group, head_dim]
    return split.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unstack_groups(out_tile: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Undo `_stack_groups`: `[batch, kv_heads, group * rows, head_dim]` -> `[batch, rows, q_heads, head_dim]`."""
    split = out_tile.unflatten(2, (shape.group, -1))  # [batch, kv_heads, group, rows, head_dim]
    return split.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _beyond_diagonal(
    q_start: int, q_end: int, k_start: int, k_end: int, shape: AttentionShape, device: torch.device
) -> torch.Tensor:
    """Return `[group * rows, keys]`, True where the key lies after the last one that the query may see."""
    queries = torch.arange(q_start, q_end, device=device).repeat(shape.group)  # [group * rows]
    keys = torch.arange(k_start, k_end, device=device)  # [keys]
    return keys[None, :] > queries[:, None] + shape.causal_offset


def _report_pair(shape: AttentionShape, input_bytes: int, rows: int, keys: int, tile_q: int, tile_k: int) -> None:
    counters.report("tiled.pairs", **tile_pair_step(shape, input_bytes, rows, keys, tile_q, tile_k))


def _report_q_tile(shape: AttentionShape, input_bytes: int, rows: int) -> None:
    counters.report("tiled.queries", **q_tile_step(shape, input_bytes, rows))
