"""FlashAttention as a layer of a model: the sizes are fixed once, and every call is checked against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_teach.attention.shapes import AttentionShape, check_count, check_tensor
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.errors import InvalidArgumentError


class FlashAttention(torch.nn.Module):
    """`FlashAttention(head_size=128, scale=128**-0.5, num_heads=16)(q, k, v)`: attention without a score matrix.

    - `head_size`: channels per head.
    - `scale`: what q k^T is multiplied by, 1/sqrt(head_size) by default.
    - `num_heads`, `num_kv_heads`: heads of q, and of k and v; the first a multiple of the second, by default equal.
      With `num_heads` None the tensors may have any.
    - `causal`, `window_size`, `softcap`: see `flash_interface`.
    - `dropout_p`: the probability with which a probability is dropped, in training mode only.

    It has no weights. Raises InvalidArgumentError for an argument that cannot work.
    """

    def __init__(
        self,
        head_size: int,
        scale: float | None = None,
        num_heads: int | None = None,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_size = check_count("head_size", head_size, 1)
        self.num_heads = None if num_heads is None else check_count("num_heads", num_heads, 1)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads, 1)
        if self.num_kv_heads and (self.num_heads is None or self.num_heads % self.num_kv_heads):
            raise InvalidArgumentError(
                f"num_kv_heads is {num_kv_heads} and num_heads {num_heads}; num_heads must be a multiple of it."
            )
        self.variant: VariantArguments = {
            "causal": causal,
            "scale": scale,
            "window_size": window_size,
            "softcap": softcap,
            "dropout_p": dropout_p,
        }
        one = AttentionShape(batch=1, q_len=1, kv_len=1, q_heads=1, kv_heads=1, head_dim=self.head_size)
        seeded: VariantArguments = {**self.variant, "dropout_seed": 0}  # so that the check draws no seed
        self.scale = Variant.of(one, torch.device("cpu"), **seeded).scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention of q to k and v, shaped like q.

        Shapes: q `[batch, q_len, num_heads, head_size]`, k and v `[batch, kv_len, num_kv_heads, head_size]`; or, as a
        projection leaves them, q `[batch, q_len, num_heads * head_size]`, k and v likewise, where `num_heads` is given.

        Raises InvalidArgumentError when a tensor does not fit the layer's sizes or the others.
        """
        variant: VariantArguments = {**self.variant}
        if not self.training:
            variant["dropout_p"] = 0.0
        out = flash_attention(
            self._split("q", q, self.num_heads),
            self._split("k", k, self.num_kv_heads),
            self._split("v", v, self.num_kv_heads),
            **variant,
        )
        return out.flatten(2) if q.dim() == 3 else out  # [batch, q_len, num_heads * head_size]

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer."""
        parts = [f"head_size={self.head_size}", f"scale={self.scale:g}", f"num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        return ", ".join([*parts, f"causal={self.variant['causal']}"])

    def _split(self, name: str, tensor: torch.Tensor, heads: int | None) -> torch.Tensor:
        """Return the argument `name` as `[batch, length, heads, head_size]`."""
        check_tensor(name, tensor)
        wanted = f"[batch, length, {heads or 'heads'}, {self.head_size}]"
        if heads is not None and tensor.dim() == 3 and tensor.shape[-1] == heads * self.head_size:
            return tensor.unflatten(-1, (heads, self.head_size))  # [batch, length, heads, head_size]
        fits = tensor.dim() == 4 and tensor.shape[3] == self.head_size and heads in (None, tensor.shape[2])
        if not fits:
            flat = f" or [batch, length, {heads * self.head_size}]" if heads is not None else ""
            raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; this layer takes {wanted}{flat}.")
        return tensor
