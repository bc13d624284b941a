"""FlashAttention in PyTorch: attention, and its gradient, without the score matrix.

Algorithm 1 of FlashAttention-2 (arXiv 2307.08691, section 3.1): for each tile of queries, go over the tiles of keys,
and carry the online softmax along. Only one tile of scores exists at a time, so memory grows with n and not with n².
The gradient is in `tiled_backward`.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch

from vllm_teach import counters
from vllm_teach.attention.autocast import without_autocast
from vllm_teach.attention.online_softmax import SoftmaxState, finish, update
from vllm_teach.attention.recomputing import check_differentiable, refuse_second_derivative
from vllm_teach.attention.score_tiles import ScoreTiles, stack_groups, unstack_groups
from vllm_teach.attention.shapes import AttentionShape, check_qkv, compute_dtype
from vllm_teach.attention.tiled_backward import flash_attention_backward
from vllm_teach.attention.traffic import q_tile_step, tile_pair_step, tile_pairs
from vllm_teach.attention.variant import Variant, VariantArguments


class TiledArguments(VariantArguments, total=False):
    """A variant, and what the tiled loops take beside it."""

    tile_q: int
    tile_k: int
    first_batch: int


# fmt: off
@overload
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tile_q: int = ..., tile_k: int = ...,
    return_lse: Literal[False] = ..., first_batch: int = ..., **arguments: Unpack[VariantArguments],
) -> torch.Tensor: ...
@overload
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tile_q: int = ..., tile_k: int = ...,
    return_lse: Literal[True], first_batch: int = ..., **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tile_q: int = 128,
    tile_k: int = 128,
    return_lse: bool = False,
    first_batch: int = 0,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return out, with `return_lse` (out, lse), of `flash_attention_forward`, differentiable once in q, k and v.

    For the backward pass only q, k, v, out and lse are kept, whose size is linear in n: it computes the probabilities
    again, tile by tile. Both results may be differentiated. Raises InvalidArgumentError when the arguments do not fit
    together, and for a derivative that this backward pass does not give: see `recomputing`.
    """
    shape = check_qkv(q, k, v)
    variant = Variant.of(shape, q.device, **arguments)
    check_differentiable(variant, q=q, k=k, v=v)
    call: TiledArguments = {**arguments, "tile_q": tile_q, "tile_k": tile_k, "first_batch": first_batch}
    if variant.dropout_p:
        call["dropout_seed"] = variant.dropout_seed  # drawn once: the backward pass must drop the same pairs
    out, lse = TiledAttention.apply(q, k, v, call)
    return (out, lse) if return_lse else out


class TiledAttention(torch.autograd.Function):
    """`apply(q, k, v, arguments)` returns (out, lse): `flash_attention_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: TiledArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what is linear in n, and no probability."""
        out, lse = flash_attention_forward(q, k, v, **arguments)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # a result that the loss does not use has None as its gradient
        ctx.arguments = arguments
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of q, k and v; `arguments` has none."""
        refuse_second_derivative("flash_attention")
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **ctx.arguments), None


@without_autocast
def flash_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tile_q: int = 128,
    tile_k: int = 128,
    first_batch: int = 0,
    **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of softmax(q k^T * scale) v, computed tile by tile.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`, out like q, lse
    `[batch, q_heads, q_len]`. Lengths need not be multiples of the tiles. `arguments` are those of `Variant`: causal,
    scale, window_size, pattern, softcap, alibi_slopes, dropout_p, dropout_seed. Tile pairs that the pattern empties
    are skipped, those that it leaves whole are not masked. A row that sees no key gives 0 and -inf. `first_batch` is
    the batch index of the first sequence in the dropout mask, for callers that cut a batch up. Autograd can go through
    the loop, but keeps what it meets there, n² numbers: use `flash_attention`.

    Scores, statistics, accumulator and lse are float32 for float16, bfloat16 and float32 input, and float64 for
    float64 input, under autocast too; out has q's dtype. A NaN in v that the mask hides spreads (0 · NaN is NaN) to
    the other rows of a tile pair that is visited, but not into a tile pair that is skipped.

    Raises InvalidArgumentError when the tensors do not fit together or a tile is not positive.
    """
    shape = check_qkv(q, k, v)
    variant = Variant.of(shape, q.device, **arguments)
    tiles = ScoreTiles.of(shape, variant, q.device, first_batch)
    dtype = compute_dtype(q)

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(shape.batch, shape.q_heads, shape.q_len, dtype=dtype, device=q.device)
    for (q_start, q_end), k_tiles in tile_pairs(shape, variant.pattern, tile_q, tile_k):
        q_tile = stack_groups(q[:, q_start:q_end], shape)  # [batch, kv_heads, group * rows, head_dim]
        q_tile = q_tile.to(dtype) * variant.scale
        state = SoftmaxState.empty(q_tile.shape[:-1], shape.head_dim, dtype=dtype, device=q.device)

        for (k_start, k_end), kind in k_tiles:
            k_tile = k[:, k_start:k_end].transpose(1, 2).to(dtype)  # [batch, kv_heads, keys, head_dim]
            v_tile = v[:, k_start:k_end].transpose(1, 2).to(dtype)  # [batch, kv_heads, keys, head_dim]
            scores = q_tile @ k_tile.transpose(-2, -1)  # [batch, kv_heads, group * rows, keys]
            # Softcap and ALiBi, where asked for; the mask, but for tiles that it leaves whole.
            scores = tiles.modify(scores, (q_start, q_end), (k_start, k_end), kind)
            state = update(state, scores, v_tile, keep=tiles.keep((q_start, q_end), (k_start, k_end)))
            _report_pair(shape, q.element_size(), q_end - q_start, k_end - k_start, tile_q, tile_k)

        out_tile, lse_tile = finish(state)
        out_tile = out_tile / (1 - variant.dropout_p)  # what dropout keeps stands in for what it drops
        out[:, q_start:q_end] = unstack_groups(out_tile, shape)  # rounds to q's dtype, once
        lse[:, :, q_start:q_end] = lse_tile.reshape(shape.batch, shape.q_heads, q_end - q_start)
        _report_q_tile(shape, q.element_size(), q_end - q_start)
    return out, lse


def _report_pair(shape: AttentionShape, input_bytes: int, rows: int, keys: int, tile_q: int, tile_k: int) -> None:
    counters.report("tiled.pairs", **tile_pair_step(shape, input_bytes, rows, keys, tile_q, tile_k))


def _report_q_tile(shape: AttentionShape, input_bytes: int, rows: int) -> None:
    counters.report("tiled.queries", **q_tile_step(shape, input_bytes, rows))
