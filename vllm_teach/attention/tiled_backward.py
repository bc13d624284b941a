"""FlashAttention's backward pass: the gradient of attention, from probabilities that are computed again.

Algorithm 2 of FlashAttention-2 (arXiv 2307.08691, section 3.1). With S the scores that softmax sees, lse their
log-sum-exp and dX the loss's derivative with respect to X, of one head:

    P  = exp(S - lse)            the forward's probabilities: no maximum and no sum is needed a second time
    dV = P^T dO
    dP = dO V^T
    dS = P * (dP - D)            the derivative of softmax, where D = row sum of P * dP = row sum of dO * O
    dQ = dS K * scale,  dK = dS^T Q * scale

D is what makes it tileable: it needs whole rows, but O has them summed up already. A gradient of lse itself adds
dlse * P to dS: it is taken off D. Dropout multiplies P by a mask M (0 or 1 / (1 - p)) where it meets V: P^T dO becomes
(P * M)^T dO, dP becomes M * dO V^T, and D stays. Softcap multiplies dS by its own derivative, 1 - tanh².
"""

from __future__ import annotations

from typing import Any, Unpack

import torch

from vllm_teach import counters
from vllm_teach.attention.autocast import without_autocast
from vllm_teach.attention.backward_traffic import backward_keys_step, backward_pair_step, backward_queries_step
from vllm_teach.attention.score_tiles import ScoreTiles, stack_groups, unstack_groups
from vllm_teach.attention.scores import soft_cap
from vllm_teach.attention.shapes import AttentionShape, check_qkv, check_tensor, compute_dtype
from vllm_teach.attention.traffic import Span, key_tile_pairs
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.errors import InvalidArgumentError


@without_autocast
def flash_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    tile_q: int = 128,
    tile_k: int = 128,
    first_batch: int = 0,
    **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv), shaped and typed like q, k, v, of a loss whose derivatives by out and lse are given.

    `out` and `lse` are what `flash_attention_forward` gave for q, k, v, `first_batch` and `arguments`; the tiles may
    be others. `dout` is shaped like out, `dlse` like lse `[batch, q_heads, q_len]`; None stands for a loss that does
    not depend on lse. Rows that see no key give and get gradients of 0. Tiles and sums are float32, or float64 for
    float64 input. Nothing is mutated.

    Raises InvalidArgumentError when the tensors do not fit together, a tile is not positive, or there is dropout and
    no `dropout_seed`: only the forward's seed gives the forward's mask.
    """
    shape = check_qkv(q, k, v)
    _check_rows(shape, q, {"dout": dout, "out": out, "lse": lse, "dlse": dlse})
    variant = Variant.of(shape, q.device, **arguments)
    if variant.dropout_p and arguments.get("dropout_seed") is None:
        raise InvalidArgumentError("dropout_seed is None; the backward pass needs the seed that the forward pass used.")
    tiles = ScoreTiles.of(shape, variant, q.device, first_batch)
    dtype = compute_dtype(q)

    # Both are [batch, q_heads, q_len]. A blind row has lse = -inf; with +inf, exp(S - lse) is the 0 that it must be.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    delta = (dout.to(dtype) * out.to(dtype)).sum(dim=-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
    counters.report("tiled.backward.queries", **backward_queries_step(shape, q.element_size(), dlse is not None))

    for (k_start, k_end), q_tiles in key_tile_pairs(shape, variant.pattern, tile_q, tile_k):
        k_tile = k[:, k_start:k_end].transpose(1, 2).to(dtype)  # [batch, kv_heads, keys, head_dim]
        v_tile = v[:, k_start:k_end].transpose(1, 2).to(dtype)  # [batch, kv_heads, keys, head_dim]
        dk_tile, dv_tile = (torch.zeros(k_tile.shape, dtype=dtype, device=q.device) for _ in range(2))

        for (q_start, q_end), kind in q_tiles:
            q_tile = stack_groups(q[:, q_start:q_end], shape).to(dtype) * variant.scale
            dout_tile = stack_groups(dout[:, q_start:q_end], shape).to(dtype)  # [batch, kv_heads, group * rows, d]
            lse_tile, delta_tile = (x[:, :, q_start:q_end].reshape(*q_tile.shape[:-1], 1) for x in (lse, delta))
            span = (q_start, q_end), (k_start, k_end)

            p, cap_slope = _probabilities(tiles, q_tile @ k_tile.transpose(-2, -1), lse_tile, *span, kind)
            dp = dout_tile @ v_tile.transpose(-2, -1)  # [batch, kv_heads, group * rows, keys]
            kept, dp = _drop(p, dp, tiles.keep(*span), variant.dropout_p)
            dv_tile += kept.transpose(-2, -1) @ dout_tile  # sums over the rows of all heads of a group
            ds = dp.sub_(delta_tile).mul_(p)
            if cap_slope is not None:
                ds.mul_(cap_slope)
            dq[:, q_start:q_end] += unstack_groups(ds @ k_tile, shape)  # the scale follows at the end
            dk_tile += ds.transpose(-2, -1) @ q_tile  # q_tile is scaled already
            _report_pair(shape, q.element_size(), q_end - q_start, k_end - k_start, tile_q, tile_k)

        dk[:, k_start:k_end] = dk_tile.transpose(1, 2)  # [batch, keys, kv_heads, head_dim]; rounds to k's dtype
        dv[:, k_start:k_end] = dv_tile.transpose(1, 2)
        counters.report("tiled.backward.keys", **backward_keys_step(shape, q.element_size(), k_end - k_start))
    return dq.mul_(variant.scale).to(q.dtype), dk, dv


def _probabilities(
    tiles: ScoreTiles, scores: torch.Tensor, lse: torch.Tensor, rows: Span, keys: Span, kind: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return P's tile and softcap's derivative there (None without softcap), from q k^T * scale and lse.

    Shapes: `[batch, kv_heads, group * rows, keys]`, and `[batch, kv_heads, group * rows, 1]` for lse.
    """
    cap, slope = tiles.variant.softcap, None
    if cap:
        scores = soft_cap(scores, cap)
        slope = 1 - (scores / cap).square()
    scores = tiles.bias_and_mask(scores, rows, keys, kind)
    return torch.exp(scores - lse), slope


def _drop(
    p: torch.Tensor, dp: torch.Tensor, keep: torch.Tensor | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P and dP under dropout's mask; both as they are without one."""
    if keep is None:
        return p, dp
    mask = keep.to(p.dtype) / (1 - dropout_p)
    return p * mask, dp.mul_(mask)


def _check_rows(shape: AttentionShape, q: torch.Tensor, tensors: dict[str, Any]) -> None:
    """Raise InvalidArgumentError unless out and lse, and their gradients, have a float for each query of q."""
    for name, tensor in tensors.items():
        wanted = [shape.batch, shape.q_heads, shape.q_len] if name.endswith("lse") else list(q.shape)
        if tensor is None and name == "dlse":
            continue
        check_tensor(name, tensor, f" {wanted}")
        if list(tensor.shape) != wanted:
            raise InvalidArgumentError(
                f"{name} has shape {list(tensor.shape)} and q {list(q.shape)}; {name} must be {wanted}."
            )
        if not tensor.dtype.is_floating_point or tensor.device != q.device:
            raise InvalidArgumentError(
                f"{name} has dtype {tensor.dtype} on {tensor.device} and q {q.dtype} on {q.device}; give floats there."
            )


def _report_pair(shape: AttentionShape, input_bytes: int, rows: int, keys: int, tile_q: int, tile_k: int) -> None:
    step = backward_pair_step(shape, input_bytes, rows, keys, tile_q, tile_k)
    counters.report("tiled.backward.pairs", **step)
