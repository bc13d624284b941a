"""Layers whose matrix stays quantised: it is dequantised a tile at a time, inside the product, and never as a whole.

The kernels are `vllm_teach.kernels.quantized_matmul` on the CPU and `triton_kernels.dequantize_matmul` on a GPU: two
modules with the same functions, each around a layout of its own.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.quantized_weight import QuantizedWeight


@lru_cache(maxsize=2)
def kernel_for(device_type: str) -> ModuleType:
    """Return the module with `pack`, `unpack`, `matmul`, `gated_matmul` and `rows` for weights on "cpu" or "cuda".

    Raises MissingDependencyError on a GPU where Triton is not installed.
    """
    name = "triton_kernels.dequantize_matmul" if device_type == "cuda" else "quantized_matmul"
    return import_module(f"vllm_teach.kernels.{name}")


class QuantizedMatrix(nn.Module):
    """A packed weight `[out_features, in_features]`, or those rows of one that several layers share (`join`).

    For inference alone: it has no gradient, is not in `state_dict`, and stays on the device of `weight`.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.out_features, self.in_features, self.bits = weight.out_features, weight.in_features, weight.bits
        self.device = weight.codes.device
        self.packed = self.kernel.pack(weight.codes, weight.scales, weight.zeros, weight.bits, weight.group_of)
        self.first_row = 0

    @property
    def kernel(self) -> ModuleType:
        """The module that multiplies: see `kernel_for`."""
        return kernel_for(self.device.type)

    @property
    def num_weights(self) -> int:
        """How many weights the matrix has."""
        return self.out_features * self.in_features

    def quantized_weight(self) -> QuantizedWeight:
        """Return the weight that the layer was made of, exactly: its codes unpacked, its scales and zeros."""
        rows = slice(self.first_row, self.first_row + self.out_features)
        codes, scales, zeros, bits, group_of = self.kernel.unpack(self.packed)
        return QuantizedWeight(codes[rows], scales[rows], zeros[rows], bits, group_of)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x `[tokens, in_features]` times the transposed matrix, plus `bias`: `[tokens, out_features]`.

        Raises InvalidArgumentError when `x` is on another device, or a gradient is asked for.
        """
        self.check(x)
        if self.out_features == self.packed.out_features:
            return self.kernel.matmul(x, self.packed, bias)
        # Rows of a shared matrix: computing all of it is right, if slow, and `together` is there for speed.
        whole = self.kernel.matmul(x, self.packed, out_dtype=torch.float32)
        out = whole[:, self.first_row : self.first_row + self.out_features]
        return (out if bias is None else out + bias.float()).to(x.dtype)

    def check(self, x: Tensor) -> None:
        """Raise InvalidArgumentError when `x` is on another device than the matrix, or a gradient is asked for."""
        if x.device != self.device:
            raise InvalidArgumentError(
                f"x is on {x.device}, and a quantised layer stays where it was made, on {self.device}: load the model "
                "with the device that you want."
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidArgumentError(
                "x requires a gradient, which a quantised layer lacks: use torch.no_grad(), or the unquantised model."
            )

    def extra_repr(self) -> str:
        """Return what the model's printout says of the layer."""
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


class QuantizedLinear(QuantizedMatrix):
    """A linear layer, y = x wᵀ + b, whose w is quantised and whose b, if it has one, is not."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[tokens, in_features]` to `[tokens, out_features]`, in x's dtype; sums are float32."""
        return self.multiply(x, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """An embedding whose matrix `[vocab_size, hidden_size]` is quantised; it serves as output matrix, too.

    `dtype` is that of the vectors it returns.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__(weight)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Return the dequantised rows of `ids`, integers `[tokens]`: `[tokens, hidden_size]` in `dtype`."""
        return self.kernel.rows(self.packed, ids, self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` `[tokens, hidden_size]` times the transposed matrix: `[tokens, vocab_size]`."""
        return self.multiply(hidden)


def join(*layers: QuantizedLinear) -> bool:
    """Put the matrices of layers that read one input behind one another, for `together`; return whether it did.

    Each layer stays what it was, under its own name, but holds its rows of one shared matrix. Layers whose bits or
    groups differ, or of which only some have a bias, are left apart.
    """
    if _joined(layers):
        return True
    weights = [layer.quantized_weight() for layer in layers]
    first = weights[0]
    if len({layer.bias is None for layer in layers}) > 1 or not all(_alike(first, weight) for weight in weights):
        return False
    codes, scales, zeros = (
        torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales", "zeros")
    )
    packed = kernel_for(codes.device.type).pack(codes, scales, zeros, first.bits, first.group_of)
    first_row = 0
    for layer in layers:
        layer.packed, layer.first_row = packed, first_row
        first_row += layer.out_features
    return True


def together(x: Tensor, *layers: QuantizedLinear) -> tuple[Tensor, ...]:
    """Return what each layer makes of x `[tokens, in_features]`: in one product if they were joined in this order."""
    if not _joined(layers):
        return tuple(layer(x) for layer in layers)
    layers[0].check(x)
    whole = layers[0].kernel.matmul(x, layers[0].packed, _joined_bias(layers))
    return whole.split([layer.out_features for layer in layers], dim=-1)


def gated(x: Tensor, gate: QuantizedLinear, up: QuantizedLinear) -> Tensor:
    """Return silu(gate(x)) · up(x) for x `[tokens, in_features]`: in one kernel if they were joined in this order."""
    if not _joined((gate, up)):
        return F.silu(gate(x)) * up(x)
    gate.check(x)
    return gate.kernel.gated_matmul(x, gate.packed, _joined_bias((gate, up)))


def _joined_bias(layers: tuple[QuantizedLinear, ...]) -> Tensor | None:
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def _joined(layers: tuple[QuantizedLinear, ...]) -> bool:
    packed, row = layers[0].packed, 0
    for layer in layers:
        if layer.packed is not packed or layer.first_row != row:
            return False
        row += layer.out_features
    return row == packed.out_features


def _alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if one.bits != other.bits or one.num_groups != other.num_groups:
        return False
    if one.group_of is None or other.group_of is None:
        return one.group_of is other.group_of
    return torch.equal(one.group_of, other.group_of)
