"""Quantises a model: folder in, folder out. The work is kept layer by layer, so a run that broke off goes on.

Each layer is a safetensors file of its own in the new folder, written when the layer is done; the last file holds what
is no layer: embedding, final norm, output matrix. What the algorithms do is `vllm_teach.quantization`'s.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layered import LayeredDecoder
from vllm_teach.models.load import load_config, load_model
from vllm_teach.models.partial_folder import PartialFolder, read_parts
from vllm_teach.models.quantize_summary import QuantizeSummary
from vllm_teach.models.quantized_files import QuantizedFiles, SourceModel, reports_of
from vllm_teach.models.weight_files import weight_files
from vllm_teach.quantization.awq_format import check_awq_shape
from vllm_teach.quantization.calibration import quantize_layers
from vllm_teach.quantization.gptq_format import check_gptq_shape
from vllm_teach.quantization.layered_model import LinearReport
from vllm_teach.quantization.quantization_config import QuantizationConfig, read_config
from vllm_teach.version import __version__

CALIBRATED = ("gptq", "awq")
_GROUP_MULTIPLE = 8  # what the kernels read at once


def quantize_model(
    source: Path | str,
    output: Path | str,
    config: QuantizationConfig,
    calibration_ids: Tensor | None = None,
    *,
    progress: bool = True,
) -> QuantizeSummary:
    """Write a quantised copy of the model in the folder `source` to the new folder `output`; return how it went.

    The linear layers of all decoder layers are quantised as `config` says, and with `head_bits` = 8 embedding and
    output matrix, too; all else keeps the dtype it has. `calibration_ids`, int64 `[samples, len]`, is what "gptq" and
    "awq" learn from; for the other methods it may be None, and then no errors are measured. Memory: the model once in
    its own dtype, and one layer in float32 beside the calibration's hidden states. `progress` draws a bar over layers.

    A run that breaks off leaves `output`.partial, and the same call goes on from there, to the same files.

    Raises InvalidArgumentError for a `config` that does not suit the model, for calibration ids that are missing or
    unusable, for a model that is quantised already, and for an `output` that is there or belongs to another run;
    ModelNotFoundError and ModelLoadError for the source; CacheError when nothing can be written.
    """
    source, output = Path(source), Path(output)
    shape = check_quantizable(source, config)
    _check_ids(calibration_ids, config, shape)
    model = SourceModel(source)
    with PartialFolder(output, _identity(source, config, calibration_ids)) as folder:
        files = QuantizedFiles(folder, model, config)
        _quantize_layers(files, calibration_ids, progress)
        files.save_rest()
        summary = _summarise(files, output)
        folder.publish()
    return summary


def read_reports(
    source: Path | str, output: Path | str, config: QuantizationConfig, calibration_ids: Tensor | None = None
) -> dict[str, LinearReport]:
    """Return how well the linear layers came through in `output`, which `quantize_model` wrote, called like this.

    Raises InvalidArgumentError, naming the difference, when `output` comes from another call, or none, and
    ModelLoadError when what it says of itself is damaged.
    """
    parts = read_parts(Path(output), _identity(Path(source), config, calibration_ids))
    return {name: report for part in parts for name, report in reports_of(part).items()}


def _quantize_layers(files: QuantizedFiles, ids: Tensor | None, progress: bool) -> None:
    """Quantise the layers that are not there yet, each on what the ones before it give when they are quantised."""
    finished, config = files.count_finished(), files.config
    if finished == files.layers:
        return
    model = LayeredDecoder(load_model(files.source.folder, files.source.dtype))
    for layer in range(finished):
        model.apply(files.read_layer(layer))
    results = quantize_layers(
        model,
        ids,
        "rtn" if config.method == "int8" else config.method,
        bits=config.bits,
        group_size=config.group_size,
        symmetric=config.symmetric,
        act_order=config.act_order,
        min_zero=1 if config.layout == "gptq" else 0,  # version 1 stores no zero of 0
        start=finished,
        progress=progress,
    )
    for result in results:
        files.save_layer(result)


def _summarise(files: QuantizedFiles, output: Path) -> QuantizeSummary:
    reports = {name: report for layer in range(files.layers) for name, report in files.reports(layer).items()}
    return QuantizeSummary(output, files.config, files.describe(), reports)


def check_quantizable(source: Path, config: QuantizationConfig) -> ModelConfig:
    """Return the shape of the model in `source`.

    Raises InvalidArgumentError, naming a layer and what would work, when the model is quantised already or when its
    matrices do not suit the group size or the layout of `config`. Otherwise as `load_config`.
    """
    already = read_config(source)
    if already is not None:
        raise InvalidArgumentError(
            f"the model in {source} is quantised already ({already.method}, {already.bits} bits): give the unquantised "
            "one."
        )
    shape = load_config(source)
    linears = {
        name: module
        for name, module in Decoder(shape).named_modules()
        if isinstance(module, nn.Linear) and name.startswith("model.layers.")
    }
    common = math.gcd(*(module.in_features for module in linears.values()))
    for name, module in linears.items():
        if module.in_features % _GROUP_MULTIPLE:
            raise InvalidArgumentError(
                f"{name} has {module.in_features} inputs, and the kernels for quantised weights read "
                f"{_GROUP_MULTIPLE} at once: use a model whose sizes are multiples of {_GROUP_MULTIPLE}."
            )
        size = config.group_size
        if size is not None and (module.in_features % size or size % _GROUP_MULTIPLE):
            sizes = [each for each in range(_GROUP_MULTIPLE, common + 1, _GROUP_MULTIPLE) if common % each == 0]
            raise InvalidArgumentError(
                f"group_size={size} does not cut the {module.in_features} inputs of {name} into whole groups of a "
                f"multiple of {_GROUP_MULTIPLE}: use {' or '.join(map(str, [*sizes, -1]))} (-1 is a whole row)."
            )
        if config.layout == "awq":
            check_awq_shape(module.out_features, name)
        elif config.layout != "vllm_teach":  # which holds every multiple of 8 inputs
            check_gptq_shape(module.out_features, module.in_features, name)
    return shape


def _check_ids(ids: Tensor | None, config: QuantizationConfig, shape: ModelConfig) -> None:
    if ids is None:
        if config.method in CALIBRATED:
            raise InvalidArgumentError(f"calibration_ids is None: {config.method!r} learns from int64 [samples, len].")
        return
    if ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
        raise InvalidArgumentError(
            f"calibration_ids has dtype {ids.dtype} and shape {list(ids.shape)}: give int64 [samples, len]."
        )
    if ids.shape[1] > shape.max_position:
        raise InvalidArgumentError(
            f"calibration_ids has samples of {ids.shape[1]} tokens, and the model takes {shape.max_position}: use a "
            "shorter length."
        )
    if not 0 <= int(ids.min()) <= int(ids.max()) < shape.vocab_size:
        raise InvalidArgumentError(
            f"calibration_ids holds {int(ids.min())} to {int(ids.max())}; this model's ids are 0 to "
            f"{shape.vocab_size - 1}."
        )


def _identity(source: Path, config: QuantizationConfig, ids: Tensor | None) -> dict[str, object]:
    """Return what makes a run this run: what was quantised, from what, how, by which version."""
    digest = hashlib.sha256()
    for file in (source / "config.json", *weight_files(source)):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    text = None if ids is None else hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest()
    return {
        "vllm_teach": __version__,
        "source_sha256": digest.hexdigest(),
        "calibration": None if ids is None else {"shape": list(ids.shape), "sha256": text},
        **asdict(config),
    }
