"""A tensor of any shape as the rows that a norm's kernel goes through, and the tensors that must fit it."""

from collections.abc import Mapping

from torch import Tensor

from vllm_teach.errors import InvalidArgumentError


def as_rows(x: Tensor) -> Tensor:
    """Return `x` `[..., size]` as `[rows, size]`: rows may lie apart, the numbers of one lie behind one another.

    A copy only where no view is that.
    """
    x = x.resolve_neg()
    matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def check_alike(x: Tensor, residual: Tensor | None, parameters: Mapping[str, Tensor | None]) -> None:
    """Raise InvalidArgumentError, naming the argument, for what a kernel beside `x` `[..., size]` would read wrongly.

    The residual must have x's shape and each of `parameters` must be `[size]`, all of x's dtype and on its device.
    """
    shapes = {"residual": x.shape} | dict.fromkeys(parameters, x.shape[-1:])
    for name, tensor in {"residual": residual, **parameters}.items():
        if tensor is None:
            continue
        if tensor.shape != shapes[name]:
            raise InvalidArgumentError(
                f"{name} has shape {list(tensor.shape)} and x {list(x.shape)}; give {name} as {list(shapes[name])}."
            )
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise InvalidArgumentError(
                f"{name} is {tensor.dtype} on {tensor.device} and x {x.dtype} on {x.device}; make them equal."
            )
