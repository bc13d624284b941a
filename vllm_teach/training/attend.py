"""The attention of training: windows side by side, causal, without a cache, with dropout on the probabilities."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vllm_teach.models.attend import Attend, window_size

# run(q, k, v, window, dropout_p): q, k, v and the result are [batch, len, heads, head_dim]
_Run = Callable[[Tensor, Tensor, Tensor, int | None, float], Tensor]


def window_attend(batch_size: int, attention: str = "memory_efficient", dropout_p: float = 0.0) -> Attend:
    """Return an `attend` for `batch_size` equally long windows behind one another; a token sees its window's past.

    `attention` is "memory_efficient" for `memory_efficient_attention` with xFormers' bias, or the name of a backend.
    Dropout's seed is drawn from PyTorch's default generator at each call. Raises InvalidArgumentError for an unknown
    name, and when called for what the backend does not have.
    """
    run = _memory_efficient if attention == "memory_efficient" else _backend(attention)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        # Under autocast the projections give bf16, and the rotation by float32 angles makes float32 of q and k.
        q, k = q.to(v.dtype), k.to(v.dtype)
        q, k, v = (x.unflatten(0, (batch_size, -1)) for x in (q, k, v))  # [tokens, …] -> [batch, len, heads, head_dim]
        return run(q, k, v, window, dropout_p).flatten(0, 1)  # [batch, len, …] -> [tokens, q_heads, head_dim]

    return attend


def _memory_efficient(q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout_p: float) -> Tensor:
    from vllm_teach.attention.attn_bias import LowerTriangularMask
    from vllm_teach.attention.memory_efficient import memory_efficient_attention
    from vllm_teach.attention.patterns.simple import LocalWindow

    # xFormers' 5-D form [batch, len, groups, heads, head_dim]: the query heads of a group share one key head, which is
    # repeated as a view.
    groups, shared = k.shape[2], q.shape[2] // k.shape[2]
    k, v = (x[:, :, :, None].expand(-1, -1, -1, shared, -1) for x in (k, v))
    bias = LowerTriangularMask() if window is None else LocalWindow(window - 1, 0)
    out = memory_efficient_attention(q.unflatten(2, (groups, shared)), k, v, bias, p=dropout_p)
    return out.flatten(2, 3)


def _backend(name: str) -> _Run:
    from vllm_teach import backends

    implementation = backends.get(name)

    def run(q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout_p: float) -> Tensor:
        return implementation.run(q, k, v, causal=True, window_size=window_size(window), dropout_p=dropout_p)

    return run
