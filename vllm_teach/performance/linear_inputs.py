"""What the linear layers of a model get to see of a text: the inputs of one of them, or the mean size of all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layered import LayeredDecoder
from vllm_teach.quantization.layered_model import read_weight


@dataclass(frozen=True, eq=False)
class LinearInputs:
    """One linear layer: its name, its weight, float32 `[out, in]`, and what it multiplies, float32 `[tokens, in]`."""

    name: str
    weight: Tensor
    inputs: Tensor


def linear_inputs(decoder: Decoder, token_ids: Tensor, linear: str) -> LinearInputs:
    """Return the linear layer `linear` and its inputs when `decoder` reads `token_ids`, int64 `[samples, len]`.

    `linear` is a name as "model.layers.1.self_attn.q_proj". Only the layers up to its own are computed, in float32.
    Raises InvalidArgumentError when no decoder layer has such a linear layer.
    """
    model = LayeredDecoder(decoder)
    states = model.embed(token_ids)
    for index in range(model.num_layers):
        layer = model.layer(index)
        walk = layer.walk(states)
        for stage, inputs in zip(layer.stages, walk, strict=True):
            if linear in stage.linears:
                return LinearInputs(linear, read_weight(layer, linear), inputs.flatten(0, 1).clone())
    raise InvalidArgumentError(
        f"linear={linear!r} is no linear layer of the model: name one as 'model.layers.0.mlp.down_proj'."
    )


def input_magnitudes(decoder: Decoder, token_ids: Tensor) -> dict[str, Tensor]:
    """Return {linear layer: the mean of |x| of each of its inputs, `[in]`} for `token_ids`, int64 `[samples, len]`."""
    model = LayeredDecoder(decoder)
    states = model.embed(token_ids)
    found: dict[str, Tensor] = {}
    for index in range(model.num_layers):
        layer = model.layer(index)
        for stage, inputs in zip(layer.stages, layer.walk(states), strict=True):
            found.update(dict.fromkeys(stage.linears, inputs.abs().mean((0, 1))))
    return found


def largest_to_median(magnitudes: dict[str, Tensor]) -> list[float]:
    """Return for each linear layer how many times larger than the median input its largest one is."""
    return [float(each.max() / each.median()) for each in magnitudes.values()]
