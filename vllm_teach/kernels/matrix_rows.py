"""A tensor of any shape as the rows that a norm's kernel goes through."""

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """Return `x` `[..., size]` as `[rows, size]`: rows may lie apart, the numbers of one lie behind one another.

    A copy only where no view is that.
    """
    x = x.resolve_neg()
    matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
