"""What quantisation asks of a model: its layers one at a time, and of each layer the inputs of its linear layers.

Linear layers that read the same inputs form a stage: q, k and v; the output projection; gate and up; down. The stages
of a layer are quantised in that order, each on the inputs that the quantised ones before it give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.quantized_weight import QuantizedWeight


@dataclass(frozen=True, eq=False)
class Stage:
    """Linear layers that read the same inputs, and what makes these inputs.

    `linears` are their names, as "model.layers.0.self_attn.q_proj"; a parameter's name is that with ".weight" or
    ".bias". Input i of each is output `source[i]` of the operator `previous`, times something that does not depend on
    it: so what input i is divided by can be divided out of `previous` instead, out of its weight's row (of a linear
    layer) or entry (of a norm). `source` is int64 `[in]`; with grouped key/value heads several inputs have one source.
    """

    linears: tuple[str, ...]
    previous: str
    source: Tensor


class WorkingLayer(Protocol):
    """One layer in float32: a copy to try things on, which changes nothing of the model it was taken from."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layer's linear layers, in the order in which they are computed."""
        ...

    def tensor(self, name: str) -> Tensor | None:
        """Return the parameter `name`, float32, not to be changed in place; None for a bias that is not there."""
        ...

    def replace(self, name: str, tensor: Tensor) -> None:
        """Compute with `tensor` as the parameter `name` from now on, rounded to the dtype of the whole model."""
        ...

    def walk(self, states: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of each stage, `[samples, len, in]`, and take `states` through the layer, IN PLACE.

        `states` are the hidden states `[samples, len, hidden]` in front of the layer; they are those behind it when
        the iterator is exhausted. What a stage yields is computed when it is asked for, with the parameters of that
        moment, and not kept: between two stages nothing exists but `states`.
        """
        ...


class LayeredModel(Protocol):
    """A model that can be quantised layer by layer."""

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states in front of layer 0, float32 `[samples, len, hidden]`, of ids `[samples, len]`."""
        ...

    def layer(self, index: int) -> WorkingLayer:
        """Return a copy of layer `index`, as the model holds it now."""
        ...

    def apply(self, result: LayerResult) -> None:
        """Put the dequantised weights and the changed tensors of a layer into the model, IN PLACE, in its dtype."""
        ...


@dataclass(frozen=True)
class LinearReport:
    """How well one linear layer came through, as shares of its output's mean square on the calibration inputs.

    `error` is E|Ŵx - Wx|² / E|Wx|² of the weights that were kept, `rtn_error` that of rounding to nearest in the same
    bits and groups, both before AWQ divides the outputs for the stage behind; None where nothing was calibrated.
    `method` is the method that gave these weights: "rtn" where GPTQ did not beat it. `damping` (GPTQ) is the share of
    the Hessian's mean diagonal that was added to it, more than was asked for where it was not positive definite;
    `alpha` (AWQ) is the exponent of the scales, 0 for none.
    """

    method: str
    error: float | None = None
    rtn_error: float | None = None
    damping: float | None = None
    alpha: float | None = None


@dataclass(frozen=True, eq=False)
class LayerResult:
    """One quantised layer.

    `weights` {linear layer: its weight}; `tensors` {parameter: its new value} for what else has changed (AWQ divides
    norms and biases), float32 with values that the model's dtype holds exactly; `reports` {linear layer: how it went}.
    """

    layer: int
    weights: dict[str, QuantizedWeight]
    tensors: dict[str, Tensor]
    reports: dict[str, LinearReport]


def read_weight(layer: WorkingLayer, linear: str) -> Tensor:
    """Return the weight `[out, in]` of the linear layer `linear`.

    Raises InvalidArgumentError when `layer` has none of that name.
    """
    weight = layer.tensor(f"{linear}.weight")
    if weight is None:
        raise InvalidArgumentError(f"linear={linear!r} has no weight in this layer: name one of its linear layers.")
    return weight
