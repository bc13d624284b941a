"""What a linear layer's inputs are like: all that GPTQ and AWQ need to know of the calibration text.

For weights that are off by D `[out, in]`, the mean squared error of the outputs is E|Dx|² = tr(D E[xxᵀ] Dᵀ). So one
matrix `[in, in]` gives the output error of any weights on all calibration inputs, and none of these must be kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError


class Hessian:
    """The second derivatives of a linear layer's squared output error by the weights of one row: the mean of 2xxᵀ.

    The same for every row (Frantar et al. 2022, arXiv 2210.17323). Batches are multiplied in float32, those of float64
    in float64, and summed in float64.
    """

    def __init__(self, in_features: int) -> None:
        if not isinstance(in_features, int) or in_features < 1:
            raise InvalidArgumentError(f"in_features={in_features!r} is not valid: give a whole number from 1.")
        self.tokens = 0
        self._products = torch.zeros(in_features, in_features, dtype=torch.float64)
        self._magnitudes = torch.zeros(in_features, dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        """Count in `inputs` `[..., in]`. Raises InvalidArgumentError for another size, and for NaN or infinity."""
        if inputs.dim() == 0 or inputs.shape[-1] != len(self._products):
            raise InvalidArgumentError(
                f"inputs has shape {list(inputs.shape)}: the last size must be {len(self._products)}."
            )
        x = inputs.reshape(-1, inputs.shape[-1])  # [tokens, in]
        x = x if x.dtype == torch.float64 else x.float()
        magnitudes = x.abs().sum(0, dtype=torch.float64)
        products = x.T @ x
        if not (magnitudes.isfinite().all() and products.isfinite().all()):
            raise InvalidArgumentError(
                "inputs hold NaN or infinity, or numbers whose squares are infinite: the model does not compute the "
                "calibration text; check it in float32."
            )
        self._magnitudes += magnitudes.to(self._magnitudes.device)
        self._products += products.to(self._products.device)
        self.tokens += len(x)

    @property
    def matrix(self) -> Tensor:
        """The mean of 2xxᵀ, float64 `[in, in]`. Raises InvalidArgumentError before the first input."""
        return self._products * (2 / self._counted())

    @property
    def magnitudes(self) -> Tensor:
        """The mean of |x| of each input, float64 `[in]`. Raises InvalidArgumentError before the first input."""
        return self._magnitudes / self._counted()

    def _counted(self) -> int:
        if not self.tokens:
            raise InvalidArgumentError("the Hessian has seen no input: give `add` some first.")
        return self.tokens


def mean_square(weight: Tensor, hessian: Tensor) -> float:
    """Return E|Wx|² for `weight` `[out, in]` and the mean of 2xxᵀ, `hessian` `[in, in]`.

    Of a difference of weights, this is the mean squared error of the outputs, summed over them. Computed in the
    Hessian's dtype.
    """
    wide = weight.to(hessian)
    return float(((wide @ hessian) * wide).sum()) / 2
