"""Reads and writes the quantised weights of a model directory, whatever their layout.

A quantised module, as "model.layers.0.mlp.up_proj", has several tensors, the module's name before each: "….qweight",
"….scales" and so on. What is not quantised (norms, biases, most embeddings) lies beside them as in any other model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from vllm_teach.quantization import awq_format, gptq_format, own_format
from vllm_teach.quantization.quantization_config import QuantizationConfig, read_config
from vllm_teach.quantization.quantized_weight import QuantizedWeight

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_KINDS = {
    "qweight": torch.int32,
    "qzeros": torch.int32,
    "g_idx": torch.int32,
    "codes": torch.uint8,
    "zeros": torch.uint8,
    "group_of": torch.int32,
}
_PARTS = {
    "awq": awq_format.TENSORS,
    "gptq": (*gptq_format.TENSORS, "g_idx"),
    "gptq_v2": (*gptq_format.TENSORS, "g_idx"),
    "vllm_teach": (*own_format.TENSORS, "group_of"),
}
_OPTIONAL = ("g_idx", "group_of")


def pack_weight(module: str, weight: QuantizedWeight, config: QuantizationConfig) -> dict[str, Tensor]:
    """Return the tensors, by their full names, that stand for `module`'s `weight` in a file of `config`'s layout.

    Raises InvalidArgumentError for a weight that the layout cannot hold.
    """
    if config.layout == "awq":
        tensors = awq_format.pack_awq(weight)
    elif config.layout == "vllm_teach":
        tensors = own_format.pack_own(weight)
    else:
        tensors = gptq_format.pack_gptq(weight, version=_version(config))
    return {f"{module}.{part}": tensor for part, tensor in tensors.items()}


def unpack_weight(module: str, tensors: Mapping[str, Tensor], config: QuantizationConfig) -> QuantizedWeight:
    """Return the weight of `module` from its tensors, by their full names: the inverse of `pack_weight`.

    Scales in another dtype than float16, as some published models have, are rounded to it. Raises
    InvalidArgumentError for tensors that are missing, of another kind, or do not fit together or to `config`.
    """
    parts = {}
    for part in _PARTS[config.layout]:
        if f"{module}.{part}" in tensors:
            parts[part] = tensors[f"{module}.{part}"]
        elif part not in _OPTIONAL:
            raise InvalidArgumentError(f"{part} is missing: give all tensors of {module}.")
    # Without it the inputs would be taken for runs, and the weights for others.
    if config.layout != "vllm_teach" and config.act_order and not parts.get("g_idx", torch.empty(0)).numel():
        raise InvalidArgumentError(f"g_idx is missing, and the config says desc_act: give all tensors of {module}.")
    _check_kinds(parts)
    parts["scales"] = parts["scales"].to(torch.float16)
    if not bool(parts["scales"].isfinite().all()):
        raise InvalidArgumentError("scales holds NaN, infinity or numbers beyond float16: use another model.")
    if config.layout == "awq":
        weight = awq_format.unpack_awq(parts)
    elif config.layout == "vllm_teach":
        weight = own_format.unpack_own(parts, config.bits_of(module))
    else:
        weight = gptq_format.unpack_gptq(parts, config.bits, version=_version(config))
    size = config.group_size_of(module) or weight.in_features
    if weight.num_groups != -(-weight.in_features // size):
        raise InvalidArgumentError(
            f"scales has {weight.num_groups} groups for {weight.in_features} inputs, and the config says "
            f"group_size={size}: put config and weights of the same model together."
        )
    return weight


def read_quantized(folder: Path | str, module: str) -> QuantizedWeight:
    """Return the quantised weight of one module of the model in `folder`. For many of them: QuantizedCheckpoint."""
    return QuantizedCheckpoint(folder).read(module)


class QuantizedCheckpoint:
    """The quantised weights of one model directory.

    Attributes: `folder`; `config`, what it says of itself; `modules`, the names of the quantised modules, sorted;
    `tensor_names`, the full names of the tensors that hold them. Raises ModelNotFoundError when the directory has no
    safetensors weights or no quantization_config, ModelLoadError when a file is missing or damaged, or no tensor is
    quantised.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        config = read_config(self.folder)
        if config is None:
            raise ModelNotFoundError(
                f"{folder} holds no quantised model, its config.json has no quantization_config: make one with "
                "`vllm-teach quantize`, or load it without `quantization`."
            )
        self.config = config
        self._files = _tensor_files(self.folder)
        first, parts = _PARTS[config.layout][0], _PARTS[config.layout]
        self.modules = sorted(name.removesuffix(f".{first}") for name in self._files if name.endswith(f".{first}"))
        if not self.modules:
            raise ModelLoadError(
                f"{folder} is quantised by {config.method!r}, its config says, but none of its tensors is: take the "
                "quantization_config (or quantize_config.json) away, or download the model again."
            )
        self.tensor_names = {f"{module}.{part}" for module in self.modules for part in parts} & self._files.keys()

    def read(self, module: str) -> QuantizedWeight:
        """Return the weight of `module`. Raises ModelLoadError, naming file and module, for tensors that are wrong."""
        names = [name for part in _PARTS[self.config.layout] if (name := f"{module}.{part}") in self._files]
        tensors = {name: self._tensor(name) for name in names}
        try:
            return unpack_weight(module, tensors, self.config)
        except InvalidArgumentError as error:
            reason = str(error).rstrip(".")
            raise ModelLoadError(
                f"{module} in {self.folder} cannot be read ({reason}): quantise or download the model again."
            ) from error

    def _tensor(self, name: str) -> Tensor:
        with _opened(self._files[name]) as opened:
            return opened.get_tensor(name)


def _check_kinds(parts: Mapping[str, Tensor]) -> None:
    for part, tensor in parts.items():
        if part in _KINDS and tensor.dtype != _KINDS[part]:
            raise InvalidArgumentError(f"{part} has dtype {tensor.dtype}: it must have {_KINDS[part]}.")
        if part not in _OPTIONAL and tensor.dim() != 2:
            raise InvalidArgumentError(f"{part} has shape {list(tensor.shape)}: it must have two dimensions.")
    if not parts["scales"].is_floating_point():
        raise InvalidArgumentError(f"scales has dtype {parts['scales'].dtype}: it must hold floating-point numbers.")


def _version(config: QuantizationConfig) -> int:
    return 2 if config.layout == "gptq_v2" else 1


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return which file holds each tensor."""
    if (folder / _SINGLE).is_file():
        with _opened(folder / _SINGLE) as opened:
            return dict.fromkeys(opened.keys(), folder / _SINGLE)
    index = folder / _INDEX
    if not index.is_file():
        raise ModelNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: give a model directory.")
    try:
        return {name: folder / file for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index} is damaged ({error}): download it again.") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is damaged or missing ({error}): download or quantise it again.") from error
