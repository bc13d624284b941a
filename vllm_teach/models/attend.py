"""The seam between the decoder and whoever keeps the keys and values: `attend`.

The decoder works on a flat batch of tokens and knows neither sequences nor caches. Each attention layer hands its q, k
and v to `attend(layer, q, k, v)`, which knows which token belongs to which sequence, stores k and v if it keeps a
cache, and answers what each token read. A layer with a sliding window passes `window=` as well; an `attend` without
that parameter therefore fails on such a model instead of computing full attention.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_teach.attention.shapes import check_count


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

    `backend` names an attention implementation of `vllm_teach.backends`, or is "auto": selected for each call. Raises
    InvalidArgumentError for an unknown name, and when called with what the backend does not support. Nothing is
    stored: each call computes from the k and v it is given.
    """
    from vllm_teach import backends
    from vllm_teach.backends.dispatch import AUTO
    from vllm_teach.backends.dispatch import attend as attend_with

    if backend != AUTO:
        backends.get(backend)  # an unknown name is refused here, not in some layer

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = q[None], k[None], v[None]  # one sequence: [1, len, heads, head_dim]
        return attend_with(q, k, v, backend=backend, causal=True, window_size=window_size(window))[0]

    return attend


def window_size(window: int | None) -> tuple[int, int]:
    """Return FlashAttention's (left, right) for a causal window of `window` keys, the query's own among them.

    Raises InvalidArgumentError when `window` is not positive.
    """
    return (-1, -1) if window is None else (check_count("window", window, 1) - 1, 0)
