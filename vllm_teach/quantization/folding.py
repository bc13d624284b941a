"""AWQ's division of the inputs, moved into the weights of the operator that makes them (section 3.2 of the paper)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_teach.quantization.layered_model import Stage, WorkingLayer, read_weight
from vllm_teach.quantization.quantized_weight import QuantizedWeight
from vllm_teach.quantization.rounding import LARGEST_SCALE, SMALLEST_SCALE


def fold_scales(
    layer: WorkingLayer,
    stage: Stage,
    scales: Tensor,
    weights: dict[str, QuantizedWeight],
    tensors: dict[str, Tensor],
) -> Tensor:
    """Divide the inputs of `stage` by `scales` `[in]`, in the operator before it; return by what they are now divided.

    Changes `layer` IN PLACE, and records the operator's new parameters: in `weights` when it is a linear layer that
    stands there, quantised already, else in `tensors`. The weights of the stage itself are left to the caller, who
    multiplies them by what is returned: `scales` up to the rounding of a norm to the model's dtype, so that the product
    stays exactly what it was. (A quantised layer keeps its codes, and its float16 scales are rounded once more, by one
    part in 2,048 at most.) Inputs of one source must have the same scale.
    """
    name = stage.previous
    old, bias = read_weight(layer, name), layer.tensor(f"{name}.bias")
    divisors = torch.ones(len(old)).to(scales)
    divisors[stage.source] = scales
    if name in weights:
        weights[name] = divide_rows(weights[name], divisors)
        layer.replace(f"{name}.weight", weights[name].dequantize())
    else:
        new = _replace(layer, f"{name}.weight", old / divisors.view(-1, *[1] * (old.dim() - 1)), tensors)
        if old.dim() == 1:
            divisors = torch.where(new == 0, divisors, old / new)
    if bias is not None:
        _replace(layer, f"{name}.bias", bias / divisors, tensors)
    return divisors[stage.source]


def divide_rows(weight: QuantizedWeight, divisors: Tensor) -> QuantizedWeight:
    """Return `weight` with output o divided by `divisors[o]`: its codes stay, and only its scales change."""
    scales = (weight.scales.float() / divisors[:, None]).clamp(SMALLEST_SCALE, LARGEST_SCALE).half()
    return replace(weight, scales=scales)


def _replace(layer: WorkingLayer, name: str, new: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Put `new` into the layer; record and return what it has become there, rounded to the model's dtype."""
    layer.replace(name, new)
    there = layer.tensor(name)
    assert there is not None  # it has just been put there
    tensors[name] = there
    return there
