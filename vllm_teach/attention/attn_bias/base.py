"""What a bias is: something that could be written as a tensor added to the scores, and seldom is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vllm_teach.attention.shapes import check_count
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
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidArgumentError(f"dtype is {dtype!r}; a bias holds -inf: give a float's of 16 bits or more.")
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def lengths_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return (q_len, kv_len), the last two of `shape`; raise InvalidArgumentError when it is no shape that has them."""
    if not isinstance(shape, list | tuple) or len(shape) < 2:
        raise InvalidArgumentError(f"shape is {shape!r}; give [..., q_len, kv_len].")
    *_, q_len, kv_len = (check_count(f"shape[{i}]", size, 0) for i, size in enumerate(shape))
    return q_len, kv_len
