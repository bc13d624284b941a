"""Chunked attention's loops, forward and backward, as one step that autograd sees from outside.

The backward pass keeps q, k, v, the bias, out and lse, and computes each chunk's weights again: the paper does so by
checkpointing every chunk (figure 1). Its gradient needs no formula of our own. With L = lse, held constant, write

    Z = sum over chunks of l,   N = sum over chunks of acc,   out = N / Z,   lse = L + log Z,

where l and acc are a chunk's sums of exp(score - L), so that Z = 1. The quotient rule gives dN = dout and
dZ = dlse - dout · out, the same for every chunk, and autograd takes them through one chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_teach import counters
from vllm_teach.attention.autocast import without_autocast
from vllm_teach.attention.chunk_summaries import (
    Chunk,
    ChunkedCall,
    Operands,
    chunk_scores,
    kept_pairs,
    merge_all,
    summarise,
    weigh,
)
from vllm_teach.attention.chunk_traffic import backward_step, merge_step, summary_step
from vllm_teach.attention.online_softmax import SoftmaxState, finish, finite
from vllm_teach.attention.recomputing import refuse_second_derivative
from vllm_teach.attention.score_tiles import group_heads, ungroup_heads
from vllm_teach.attention.shapes import compute_dtype


class ChunkedAttention(torch.autograd.Function):
    """`apply(call, q, k, v, bias)` returns (out, lse); both may be differentiated, once.

    q `[batch, q_len, q_heads, head_dim]`, k `[batch, kv_len, kv_heads, head_dim]`, v likewise with its own last size,
    bias `[1 or batch, 1 or q_heads, 1 or q_len, 1 or kv_len]` or None.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ChunkedCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `forward_chunks`."""
        out, lse = forward_chunks(call, q, k, v, bias)
        ctx.call = call
        ctx.save_for_backward(q, k, v, bias, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """See `backward_chunks`."""
        refuse_second_derivative("chunked_attention")
        q, k, v, bias, out, lse = ctx.saved_tensors
        return None, *backward_chunks(ctx.call, q, k, v, bias, (out, lse), (dout, dlse), ctx.needs_input_grad[4])


@without_autocast
def forward_chunks(
    call: ChunkedCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out `[batch, q_len, q_heads, value_dim]` in the call's output dtype and lse `[batch, q_heads, q_len]`.

    Scores, sums and lse are float32, or float64 for float64 input.
    """
    s, value_dim, input_bytes = call.shape, v.shape[-1], q.element_size()
    dtype = compute_dtype(q)
    out = torch.empty(s.batch, s.q_len, s.q_heads, value_dim, dtype=call.output_dtype, device=q.device)
    lse = torch.empty(s.batch, s.q_heads, s.q_len, dtype=dtype, device=q.device)
    for rows, chunks in call.chunks():
        q_rows = group_heads(q[:, slice(*rows)].to(dtype), s)
        summaries = []
        for chunk in chunks:
            summaries.append(summarise(call, chunk, _operands(q_rows, k, v, bias, chunk)))
            counters.report("chunked.summaries", **summary_step(call, chunk, value_dim, input_bytes))
        if summaries:
            state = merge_all(summaries)
        else:
            state = SoftmaxState.empty(q_rows.shape[:-1], value_dim, dtype=dtype, device=q.device)
        counters.report("chunked.merge", **merge_step(call, rows[1] - rows[0], len(summaries), value_dim, input_bytes))
        out_rows, lse_rows = finish(state)
        out[:, slice(*rows)] = ungroup_heads(out_rows)  # rounds to the output's dtype, once
        lse[:, :, slice(*rows)] = lse_rows.flatten(1, 2)  # [batch, q_heads, rows]
    return out, lse


@without_autocast
def backward_chunks(
    call: ChunkedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor],
    needs_dbias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return (dq, dk, dv, dbias), dbias None unless needed; `results` are (out, lse), `gradients` theirs."""
    (out, lse), (dout, dlse), dtype, s = results, gradients, compute_dtype(q), call.shape
    dq = torch.zeros_like(q, dtype=dtype)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    dbias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needs_dbias else None
    for rows, chunks in call.chunks():
        seen = slice(*rows)
        q_rows = group_heads(q[:, seen].to(dtype), s)
        dn = group_heads(dout[:, seen].to(dtype), s)  # [batch, kv_heads, group, rows, value_dim]
        n = group_heads(out[:, seen].to(dtype), s)
        lse_rows, dlse_rows = (x[:, :, seen].unflatten(1, q_rows.shape[1:3]) for x in (lse, dlse))
        dz = dlse_rows - (dn * n).sum(dim=-1)  # [batch, kv_heads, group, rows]
        dq_rows = torch.zeros_like(q_rows)
        for chunk in chunks:
            x = _operands(q_rows, k, v, bias, chunk)
            dq_part, dk_part, dv_part, dbias_part = _pull_back(call, chunk, x, finite(lse_rows), dz, dn, needs_dbias)
            dq_rows += dq_part
            dk[:, slice(*chunk.keys)] += dk_part.transpose(1, 2)  # [batch, keys, kv_heads, head_dim]
            dv[:, slice(*chunk.keys)] += dv_part.transpose(1, 2)
            if dbias is not None and dbias_part is not None:
                tile_of(dbias, chunk).add_(dbias_part.flatten(1, 2))  # [1 or batch, 1 or q_heads, …, …]
            counters.report("chunked.backward", **backward_step(call, chunk, v.shape[-1], q.element_size()))
        dq[:, seen] = ungroup_heads(dq_rows)
    return (
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if bias is None or dbias is None else dbias.to(bias.dtype),
    )


def _pull_back(
    call: ChunkedCall,
    chunk: Chunk,
    x: Operands,
    shift: torch.Tensor,
    dz: torch.Tensor,
    dn: torch.Tensor,
    needs_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute one chunk's l and acc again and return their gradients with respect to q, k, v and the bias."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    bias = x.bias.detach().requires_grad_(needs_dbias) if x.bias is not None else None
    kept = kept_pairs(call, chunk, q.device)
    with torch.enable_grad():
        scores = chunk_scores(call, chunk, Operands(q, k, v, bias))
        total, acc = weigh(scores, shift, v, kept, call.variant.dropout_p)
    inputs = (q, k, v, bias) if bias is not None and needs_dbias else (q, k, v)
    dq, dk, dv, *dbias = torch.autograd.grad((total, acc), inputs, (dz, dn))
    return dq, dk, dv, dbias[0] if dbias else None


def _operands(
    q_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, chunk: Chunk
) -> Operands:
    """Take the chunk's keys, values and bias, in q's dtype; `q_rows` is `[batch, kv_heads, group, rows, head_dim]`."""
    seen, dtype = slice(*chunk.keys), q_rows.dtype
    tile = None
    if bias is not None:
        tile = tile_of(bias, chunk).to(dtype)  # [1 or batch, 1 or q_heads, 1 or rows, 1 or keys]
        tile = tile.unflatten(1, (1, 1) if tile.shape[1] == 1 else tuple(q_rows.shape[1:3]))
    return Operands(q_rows, k[:, seen].transpose(1, 2).to(dtype), v[:, seen].transpose(1, 2).to(dtype), tile)


def tile_of(bias: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the view of a bias `[…, …, 1 or q_len, 1 or kv_len]` that lies over the chunk; a size of 1 stays."""
    rows = slice(*chunk.rows) if bias.shape[2] > 1 else slice(None)
    keys = slice(*chunk.keys) if bias.shape[3] > 1 else slice(None)
    return bias[:, :, rows, keys]
