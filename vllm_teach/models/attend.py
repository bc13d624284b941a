"""The seam between the decoder and whoever keeps the keys and values: `attend`.

The decoder works on a flat batch of tokens and knows neither sequences nor caches. Each attention layer hands its q, k
and v to `attend(layer, q, k, v)`, which knows which token belongs to which sequence, stores k and v if it keeps a
cache, and answers what each token read. A layer with a sliding window passes `window=` as well; an `attend` without
that parameter therefore fails on such a model instead of computing full attention.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attend(Protocol):
    """What a decoder layer calls to let its tokens read one another."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        """Return what each token read, in q's shape; may store k and v.

        q is `[tokens, q_heads, head_dim]`, k and v are `[tokens, kv_heads, head_dim]`. `window`, if given, is how many
        keys a query may see, its own token's included.
        """
        ...


def full_causal(backend: str = "sdpa") -> Attend:
    """Return an `attend` for ONE sequence without a cache: every token sees itself and all tokens before it.

    `backend` names an attention implementation of `vllm_teach.backends`. Raises InvalidArgumentError for an unknown
    name. Nothing is stored: each call computes from the k and v it is given.
    """
    from vllm_teach import backends

    implementation = backends.get(backend)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = q[None], k[None], v[None]  # one sequence: [1, len, heads, head_dim]
        scale = q.shape[-1] ** -0.5
        if window is not None and window < k.shape[1]:
            return windowed_attention(q, k, v, window=window, scale=scale, instead_of=backend)[0]
        return implementation.run(q, k, v, causal=True, scale=scale)[0]

    return attend


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, instead_of: str) -> Tensor:
    """Causal attention to the last `window` keys: query i sees key j iff 0 <= i + kv_len - q_len - j < window.

    q is `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`; the result has q's shape.
    The backends take no window, so PyTorch's attention runs with an explicit mask; where `instead_of` names another
    backend, a warning says so (Python shows it once).
    """
    if instead_of != "sdpa":
        warnings.warn(
            f"attention_backend={instead_of!r} takes no sliding window: PyTorch's masked attention is used for the "
            "layers that have one.",
            stacklevel=2,
        )
    q_len, kv_len = q.shape[1], k.shape[1]
    query = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    key = torch.arange(kv_len, device=q.device)[None, :]
    visible = (key <= query) & (key > query - window)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
