"""What a bias is: something that could be written as a tensor added to the scores, and seldom is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vllm_teach.errors import InvalidArgumentError


class AttentionBias(ABC):
    """Base of all biases. `memory_efficient_attention` also takes a subclass of yours that has `materialize` alone.

    It then adds the materialised tensor, which is quadratic in the length; the biases of this package never are.
    """

    @abstractmethod
    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return the bias as a tensor of `shape`, `[…, q_len, kv_len]`: 0 where a query sees a key, -inf where not.

        For looking at and for tests. Raises InvalidArgumentError when the bias is not made for such a shape.
        """


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where the bool tensor `visible` is True and -inf where it is False, in `dtype`."""
    if not dtype.is_floating_point:
        raise InvalidArgumentError(f"dtype is {dtype}; a bias holds -inf: give a float's.")
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def lengths_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return (q_len, kv_len), the last two of `shape`; raise InvalidArgumentError when it has fewer."""
    if len(shape) < 2:
        raise InvalidArgumentError(f"shape is {list(shape)}; give [..., q_len, kv_len].")
    return shape[-2], shape[-1]
