"""A whole model, layer by layer: each linear layer quantised on what the quantised part before it makes of a text.

Only one layer is looked at at a time, and of the text only its hidden states in front of that layer are kept. "True
sequential" in GPTQ's words: within a layer too, the output projection sees the attention of quantised q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.layer_at_work import METHODS, LayerAtWork, Settings
from vllm_teach.quantization.layered_model import LayeredModel, LayerResult, read_weight
from vllm_teach.quantization.rounding import check_group_size

__all__ = ["METHODS", "quantize_layers"]

# Tokens that go through a layer at once: what lies between two linear layers exists for so many only.
_TOKENS_AT_ONCE = 1024


def quantize_layers(
    model: LayeredModel,
    calibration_ids: Tensor | None,
    method: str,
    *,
    bits: int = 4,
    group_size: int | None = 64,
    symmetric: bool = False,
    act_order: bool = False,
    damping: float = 0.01,
    min_zero: int = 0,
    start: int = 0,
    progress: bool = False,
) -> Iterator[LayerResult]:
    """Quantise every linear layer of the layers from `start` on; yield each layer when it is done and applied.

    `model` is changed IN PLACE: its weights become what the codes stand for, and AWQ's folded norms and biases theirs.
    To go on after an interruption, `apply` the results of the layers before `start` to the model first: the rest is
    then the same, bit for bit. `calibration_ids` are int64 `[samples, len]`, each sample a text of its own; None for
    "rtn", which needs none and then reports no errors. `method` is one of `METHODS`; the other arguments are those of
    `quantize_gptq`: `act_order` and `damping` for "gptq" alone, `min_zero` not for "awq". A bar shows `progress`.

    "gptq" keeps rounding to nearest for a linear layer where it has no smaller output error on the calibration inputs;
    the report says so. Beside the model, one layer in float32 and the hidden states of all samples are held.

    Raises InvalidArgumentError, before anything is changed, for arguments that can never work.
    """
    settings = Settings(method, bits, group_size, symmetric, act_order, damping, min_zero)
    if start not in range(model.num_layers + 1):
        raise InvalidArgumentError(f"start={start!r} is not valid: give a layer from 0 to {model.num_layers}.")
    _check_ids(calibration_ids, method)
    if model.num_layers:
        layer = model.layer(0)
        for name in (name for stage in layer.stages for name in stage.linears):
            check_group_size(read_weight(layer, name).shape[1], group_size, name)
    states = None if calibration_ids is None else model.embed(calibration_ids)
    return _quantize_from(model, states, settings, start, progress)


def _check_ids(ids: Tensor | None, method: str) -> None:
    if ids is None:
        if method != "rtn":
            raise InvalidArgumentError(f"calibration_ids is None, and method={method!r} needs text: give token ids.")
    elif ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise InvalidArgumentError(
            f"calibration_ids has dtype {ids.dtype} and shape {list(ids.shape)}: give int64 [samples, len]."
        )


def _quantize_from(
    model: LayeredModel, states: Tensor | None, settings: Settings, start: int, progress: bool
) -> Iterator[LayerResult]:
    samples_at_once = 1 if states is None else max(1, _TOKENS_AT_ONCE // states.shape[1])
    for index in tqdm(range(model.num_layers), desc=settings.method, unit="layer", disable=not progress):
        layer = model.layer(index)
        walks = [] if states is None else [layer.walk(part) for part in states.split(samples_at_once)]
        if index >= start:
            result = LayerAtWork(layer, walks, settings).quantize(index)
        for walk in walks:
            for _ in walk:  # what is left of the way to the next layer
                pass
        if index >= start:
            model.apply(result)
            yield result
