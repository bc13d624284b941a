"""Biases that are one rule for the whole matrix: causal and local masks, and a causal mask with a tensor added."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from vllm_teach.attention.attn_bias.alignment import top_left
from vllm_teach.attention.attn_bias.base import AttentionBias, additive, lengths_of
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.simple import Causal, LocalWindow
from vllm_teach.attention.shapes import check_count, check_real_device, check_tensor, keep_count
from vllm_teach.errors import InvalidArgumentError


class PatternBias(AttentionBias):
    """A bias that is a pattern, once both lengths are known."""

    @abstractmethod
    def pattern(self, q_len: int, kv_len: int) -> Pattern:
        """Return which keys each of `q_len` queries sees among `kv_len`."""

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """See `AttentionBias.materialize`; serves every shape."""
        q_len, kv_len = lengths_of(shape)
        visible = self.pattern(q_len, kv_len).mask(q_len, kv_len, device)  # [q_len, kv_len]
        return additive(visible, dtype).expand(*shape)

    def to(self, device: torch.device | str) -> Self:
        """Return the bias itself: it holds no tensor."""
        return self


class LowerTriangularMask(PatternBias):
    """Causal, aligned top-left: query i sees the keys 0 to i, whatever the number of keys.

    With as many queries as keys this is the causal mask. With fewer queries than keys, as in decoding, it is not:
    see `LowerTriangularFromBottomRightMask`. `device` is not used; xFormers takes it for old callers' sake.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        pass

    def pattern(self, q_len: int, kv_len: int) -> Pattern:
        """See `PatternBias.pattern`."""
        return top_left(Causal(), q_len, kv_len)

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """Return the mask with a tensor `[batch, heads, q_len, kv_len]` added to the scores it leaves."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask`, and a tensor that is added to the scores: one gradient flows into it.

    The tensor is shaped like one given as `attn_bias`: `[batch, heads, q_len, kv_len]`, sizes of 1 allowed.
    """

    def __init__(self, bias: torch.Tensor) -> None:
        check_tensor("bias", bias)
        self._bias = bias

    @property
    def bias(self) -> torch.Tensor:
        """The tensor that is added."""
        return self._bias

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return the mask plus the tensor, in `dtype`; each size of the tensor must be that of `shape`, or 1."""
        if torch.device(device).type != "meta":
            check_real_device("bias", self._bias)
        mask = super().materialize(shape, dtype, device)
        sizes = self._bias.shape
        if len(sizes) > mask.dim() or any(a not in (1, b) for a, b in zip(sizes[::-1], shape[::-1], strict=False)):
            raise InvalidArgumentError(
                f"shape is {list(shape)} and bias has {list(sizes)}; each size of it must be that of shape, or 1."
            )
        return mask + self._bias.to(device, dtype)

    def to(self, device: torch.device | str) -> Self:
        """Return the bias with its tensor on `device`."""
        return type(self)(self._bias.to(device))


class LowerTriangularFromBottomRightMask(PatternBias):
    """Causal, aligned bottom-right: the last query sees the last key; this project's and FlashAttention's `causal`."""

    def pattern(self, q_len: int, kv_len: int) -> Pattern:
        """See `PatternBias.pattern`."""
        return Causal()

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Return the mask that also hides all but the last `window_size` of the keys a query sees."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass(frozen=True)
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal and local, aligned bottom-right: a query sees `_window_size` keys, its own position's among them.

    FlashAttention counts the keys beside the query's own: its window_size is (_window_size - 1, 0).
    """

    _window_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_window_size", check_count("window_size", self._window_size, 1))

    def pattern(self, q_len: int, kv_len: int) -> Pattern:
        """See `PatternBias.pattern`."""
        return causal_window(self._window_size)


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask(PatternBias):
    """Local, aligned bottom-right: a query sees `window_left` keys before its position, its own, `window_right` after.

    These are counted as in FlashAttention's window_size, but for -1: both must be given.
    """

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        keep_count(self, "window_left", 0)
        keep_count(self, "window_right", 0)

    def pattern(self, q_len: int, kv_len: int) -> Pattern:
        """See `PatternBias.pattern`."""
        return LocalWindow(self.window_left, self.window_right)


def causal_window(window_size: int) -> LocalWindow:
    """Return the pattern of `window_size` keys that end with the query's own, as xFormers counts."""
    return LocalWindow(window_size - 1, 0)
