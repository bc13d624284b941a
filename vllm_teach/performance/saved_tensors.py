"""What a forward pass keeps alive for its backward pass: every tensor that autograd saves, found by asking autograd."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Saved:
    """One piece of memory that waits for the backward pass: the largest tensor saved in it, and the bytes it holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def saved_for_backward(forward: Callable[[], object]) -> list[Saved]:
    """Call `forward` once and return what autograd saves meanwhile, in the order in which it was first saved.

    Two saved tensors that share memory, such as a matrix and its transpose, are one entry. Inputs that are saved are
    among them, though they would be alive without it. What a Python object keeps by itself autograd does not know.
    """
    # The tensors themselves are held until the end, so that no memory is freed and handed out a second time.
    found: dict[int, list[torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    saved = []
    for tensors in found.values():
        largest = max(tensors, key=torch.Tensor.numel)
        saved.append(Saved(tuple(largest.shape), largest.dtype, largest.untyped_storage().nbytes()))
    del result
    return saved
