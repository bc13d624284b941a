"""The parts of FlashAttention's backward pass that its two kernels share, and its specification.

The notation is that of the paper (arXiv 2307.08691, section 2.2): P = softmax(S), dP = dout v^T, and
dS = P * (dP - delta), where delta, the row sums of P * dP, equals those of out * dout, dropout or not.
"""

import torch
import triton
import triton.language as tl

from .tile_math import LOG2E, in_band, kept, load_tile, modify_scores, tanh

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_backward_spec(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, scale: float
) -> Gradients:
    """Return (dq, dk, dv) for one head without masks: q, out, dout `[q_len, head_dim]`, k, v `[kv_len, head_dim]`.

    The general one is autograd through `vllm_teach.attention.naive_attention`.
    """
    probs = torch.softmax(q @ k.T * scale, dim=1)  # P [q_len, kv_len]
    delta = (dout * out).sum(dim=1, keepdim=True)  # [q_len, 1], the sum over j of P_ij dP_ij
    dscores = probs * (dout @ v.T - delta)  # dS [q_len, kv_len]
    return dscores @ k * scale, dscores.T @ q * scale, probs.T @ dout


@triton.jit
def delta_kernel(
    out_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    total_q: tl.tensor,
    q_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
) -> None:
    """Write delta float32 `[q_heads, total_q]`, the row sums of out * dout, both contiguous."""
    rows = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    head = tl.program_id(1)
    stride = q_heads * HEAD_DIM
    out = load_tile(out_ptr + head * HEAD_DIM, rows, stride, total_q, HEAD_DIM, DIM, True)  # [TILE_Q, DIM]
    dout = load_tile(dout_ptr + head * HEAD_DIM, rows, stride, total_q, HEAD_DIM, DIM, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    tl.store(delta_ptr + head.to(tl.int64) * total_q + rows, delta, mask=rows < total_q)


@triton.jit
def score_gradients(
    product: tl.tensor,
    dprobs: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    batch_head: tl.tensor,
    slope: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    threshold: tl.tensor,
    keep_scale: tl.tensor,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> tuple:
    """Return (P as it meets v, dS) of one tile, from q k^T and dout v^T, in whichever orientation those have."""
    offset = kv_len - q_len
    scores = modify_scores(product, scale, softcap, slope, rows, keys, offset, SOFTCAP, ALIBI)
    visible = in_band(rows, keys, offset, kv_len, left, right, LEFT, RIGHT) & (rows < q_len)
    probs = tl.where(visible, tl.exp2(scores - lse * LOG2E), 0.0)  # where nothing is visible, lse is -inf: not read
    dropped = probs
    if DROPOUT:  # the mask of the forward pass, drawn again
        keep = kept(rows, keys, batch_head, seed_low, seed_high, threshold)
        dropped = tl.where(keep, probs * keep_scale, 0.0)
        dprobs = tl.where(keep, dprobs * keep_scale, 0.0)
    dscores = probs * (dprobs - delta)
    if SOFTCAP:
        capped = tanh(product * (scale / softcap))
        dscores *= 1.0 - capped * capped
    return dropped, dscores
