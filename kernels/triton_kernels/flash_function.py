"""FlashAttention as PyTorch calls it: tensors `[batch, length, heads, head_dim]` in and out, and autograd behind it.

What is kept for the backward pass is q, k, v, out and one number per query, the log-sum-exp: memory linear in the
length. The probabilities, and the dropout mask with them, are computed again.
"""

from dataclasses import replace
from typing import Any

import torch

from .flash_backward import flash_backward
from .flash_forward import flash_forward
from .problem import Lengths, Options, Problem


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options | None = None,
    *,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of softmax(q k^T * scale) v as `options` change it.

    Without `lengths`, q is `[batch, q_len, q_heads, head_dim]`, k and v are `[batch, kv_len, kv_heads, head_dim]`, out
    is like q and lse float32 `[batch, q_heads, q_len]`. With them, q and out are `[total_q, q_heads, head_dim]`, k and
    v `[total_k, kv_heads, head_dim]`, and lse is `[q_heads, total_q]`. Masks are aligned bottom-right; a row that sees
    no key gives 0 and -inf. Autograd differentiates out with respect to q, k and v; the same inputs give the same bits.

    Raises InvalidArgumentError, naming the argument, for tensors that the kernels cannot take. The values in `lengths`
    are not read here and must fit q and k.
    """
    problem = Problem.of(q, k, v, options or Options(), lengths)
    out, lse = _FlashFunction.apply(problem.q, problem.k, problem.v, problem)
    if lengths is not None:
        return out, lse
    lse = lse.view(problem.q_heads, problem.batch, problem.q_len)
    return out.view(q.shape), lse.transpose(0, 1)  # [q_heads, batch, q_len] -> [batch, q_heads, q_len]


class _FlashFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_forward(problem)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = problem
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        problem = replace(ctx.problem, q=q, k=k, v=v)  # as autograd hands them back
        return *flash_backward(problem, out, lse, dout), None
