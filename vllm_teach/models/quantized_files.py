"""The files of a quantised model while it is made: one for each layer, one for the rest, and what describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.fields import read_json
from vllm_teach.models.load import load_config
from vllm_teach.models.partial_folder import MANIFEST, PartialFolder
from vllm_teach.models.weight_files import INDEX
from vllm_teach.models.weights import Checkpoint
from vllm_teach.quantization.checkpoint import pack_weight, unpack_weight
from vllm_teach.quantization.layered_model import LayerResult, LinearReport
from vllm_teach.quantization.quantization_config import HEAD_MODULES, LEGACY_FILE, QuantizationConfig
from vllm_teach.quantization.rounding import quantize_rtn

# What a model needs beside config and weights, as far as it is there.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "LICENSE*",
)


class SourceModel:
    """The tensors of an unquantised model as they lie in its folder: those that its decoder has, and no others.

    Attributes: `folder`; `shape`, its config; `names` of the tensors; `dtype`, which the model is computed in. Raises
    ModelLoadError when a tensor is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shape = load_config(folder)
        self._checkpoint = Checkpoint(folder)
        self.names = [name for name, _ in Decoder(self.shape).named_parameters()]
        missing = [name for name in self.names if name not in self._checkpoint.files]
        if missing:
            raise ModelLoadError(f"tensor {missing[0]} is missing from {folder}: download or convert it again.")
        dtype = self.read("model.embed_tokens.weight").dtype
        # That of the embedding; float32 where it is one that the decoder does not compute in.
        self.dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype it is stored in."""
        with safe_open(self._checkpoint.files[name], framework="pt") as file:
            return file.get_tensor(name)


@dataclass(frozen=True)
class Sizes:
    """Bytes of the quantised matrices and of all tensors, in the source and in the quantised model."""

    matrices_before: int
    matrices_after: int
    model_before: int
    model_after: int


class QuantizedFiles:
    """The quantised model of `source` in `folder`, by `config`. Layer i is file i + 1, the rest is the last file."""

    def __init__(self, folder: PartialFolder, source: SourceModel, config: QuantizationConfig) -> None:
        self.folder, self.source, self.config = folder, source, config
        self.layers = source.shape.num_layers

    def file_name(self, number: int) -> str:
        """Return the name of the file of layer `number`; `layers` stands for the rest."""
        return f"model-{number + 1:05d}-of-{self.layers + 1:05d}.safetensors"

    def count_finished(self) -> int:
        """Return how many layers, from the first, are there."""
        return min(len(self.folder.parts), self.layers)

    def save_layer(self, result: LayerResult) -> None:
        """Write the file of a layer: its quantised matrices, and all else of it as `result` changed it."""
        tensors: dict[str, Tensor] = {}
        for module, weight in result.weights.items():
            tensors.update(pack_weight(module, weight, self.config))
        matrices = {f"{module}.weight" for module in result.weights}
        for name in self.source.names:
            if name.startswith(f"model.layers.{result.layer}.") and name not in matrices:
                changed = result.tensors.get(name)
                # Not in the dtype it had, which may be narrower: a run that goes on would go on from other values.
                tensors[name] = self.source.read(name) if changed is None else changed.to(self.source.dtype)
        reports = {module: asdict(report) for module, report in result.reports.items()}
        self.folder.save_part(self.file_name(result.layer), tensors, {"layer": result.layer, "reports": reports})

    def read_layer(self, layer: int) -> LayerResult:
        """Return what `save_layer` wrote."""
        with self.folder.opened(self.file_name(layer)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
        reports = self.reports(layer)
        return LayerResult(
            layer=layer,
            weights={module: unpack_weight(module, tensors, self.config) for module in reports},
            tensors={name: tensor for name, tensor in tensors.items() if name in self.source.names},
            reports=reports,
        )

    def reports(self, layer: int) -> dict[str, LinearReport]:
        """Return how well each matrix of a finished layer came through."""
        return reports_of(self.folder.parts[layer])

    def save_rest(self) -> None:
        """Write the file of what is no layer: embedding and output matrix, as `head_bits` says, and the last norm."""
        if len(self.folder.parts) > self.layers:
            return
        tensors: dict[str, Tensor] = {}
        for name in self.source.names:
            module = name.removesuffix(".weight")
            if name.startswith("model.layers."):
                continue
            if module in HEAD_MODULES and self.config.head_bits == 8:
                weight = quantize_rtn(self.source.read(name), 8, granularity="channel", symmetric=True)
                tensors.update(pack_weight(module, weight, self.config))
            else:
                tensors[name] = self.source.read(name)
        self.folder.save_part(self.file_name(self.layers), tensors, {"layer": None})

    def describe(self) -> Sizes:
        """Write index and configs, copy the tokenizer, and return what it all takes."""
        after: dict[str, int] = {}
        homes: dict[str, str] = {}
        for name in map(self.file_name, range(self.layers + 1)):
            with self.folder.opened(name) as file:
                sizes = {tensor: file.get_tensor(tensor).nbytes for tensor in file.keys()}  # noqa: SIM118
            after.update(sizes)
            homes.update(dict.fromkeys(sizes, name))
        before = {name: self.source.read(name).nbytes for name in self.source.names}
        index = {"metadata": {"total_size": sum(after.values())}, "weight_map": dict(sorted(homes.items()))}
        self.folder.write_json(INDEX, index)
        self._write_configs()
        for pattern in _COMPANIONS:
            for companion in sorted(self.source.folder.glob(pattern)):
                if companion.is_file():
                    self.folder.copy(companion)
        return Sizes(
            matrices_before=sum(size for name, size in before.items() if name not in after),
            matrices_after=sum(size for name, size in after.items() if name not in before),
            model_before=sum(before.values()),
            model_after=sum(after.values()),
        )

    def _write_configs(self) -> None:
        about = self.config.to_hf()
        config = dict(read_json(self.source.folder / "config.json").values)
        self.folder.write_json("config.json", {**config, "quantization_config": about})
        if self.config.layout in ("gptq", "gptq_v2"):
            self.folder.write_json(LEGACY_FILE, about)  # where AutoGPTQ looks first


def reports_of(part: Mapping[str, Any]) -> dict[str, LinearReport]:
    """Return how well each matrix came through, of what the manifest says of a file.

    Raises ModelLoadError when it is damaged.
    """
    try:
        return {module: LinearReport(**report) for module, report in part.get("reports", {}).items()}
    except (TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{MANIFEST} is damaged, it has reports that are none ({error}): delete its folder to start again."
        ) from error
