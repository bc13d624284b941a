"""Puts the weights of a Hugging Face directory into a `Decoder`."""

import math
from pathlib import Path
from typing import TypeVar

import torch

from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from vllm_teach.kernels.packed_weight import PANEL_ROWS
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.fields import read_json
from vllm_teach.models.shard import Shard
from vllm_teach.models.sharded_decoder import ShardedDecoder
from vllm_teach.models.weights import Checkpoint
from vllm_teach.parallel.group import Group
from vllm_teach.quantization.checkpoint import QuantizedCheckpoint
from vllm_teach.quantization.part import part_of
from vllm_teach.quantization.quantization_config import read_config

_Model = TypeVar("_Model", bound=Decoder)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(path: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """Return the model in directory `path`, its weights in `dtype` on `device`, in eval mode and without gradients.

    The decoder is built without memory and each weight is copied once, from a memory map of its file, so loading needs
    little more private memory than the weights themselves. Where config.json says that the weights are quantised (by
    AutoAWQ, GPTQ, or `vllm-teach quantize`), they stay so, and `dtype` is that of what is not.

    Raises ModelNotFoundError when `path` is no model directory, and ModelLoadError, naming file and tensor, for a
    missing, unexpected or wrongly shaped tensor, a damaged file, an unknown architecture or kind of quantisation.
    """
    folder = Path(path)
    return _filled(Decoder(load_config(folder)), folder, dtype, device)


def load_shard(
    path: Path | str, group: Group, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ShardedDecoder:
    """Return the part of the model in directory `path` that `group.rank` has; of the files, only that is read.

    Of quantised matrices the codes are read whole, one matrix at a time, and then cut. Otherwise as `load_model`, and
    InvalidArgumentError for a model that cannot be cut into `group.size` parts.
    """
    folder = Path(path)
    shard = read_shard(folder, group.rank, group.size)
    return _filled(ShardedDecoder(shard, group), folder, dtype, device, shard)


def read_shard(path: Path | str, rank: int, size: int) -> Shard:
    """Return which part of the model in directory `path` has `rank` of `size`. Reads no weights.

    Raises what `load_config` does, and InvalidArgumentError for a model that cannot be cut into `size` parts.
    """
    quantized = read_config(Path(path))
    # A cut must not go through a group of down_proj's inputs, nor through a panel of gate's and up's rows.
    unit = 1 if quantized is None else math.lcm(quantized.group_size or 1, PANEL_ROWS)
    return Shard.of(load_config(path), rank, size, unit)


def load_config(path: Path | str) -> ModelConfig:
    """Return what the config.json of a model directory says.

    Raises ModelNotFoundError when there is none, ModelLoadError, naming the file, when it is damaged or describes a
    model that `Decoder` cannot compute.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} is no model directory, it has no config.json: check the path.")
    return ModelConfig.from_hf(read_json(file).values, str(file))


def _filled(
    model: _Model, folder: Path, dtype: torch.dtype, device: torch.device | str, shard: Shard | None = None
) -> _Model:
    checkpoint = Checkpoint(folder)
    quantized = None if read_config(folder) is None else QuantizedCheckpoint(folder)
    if quantized is not None:
        _put_quantized(model, quantized, dtype, device, shard)
    whole = model if shard is None else Decoder(shard.whole)
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    wanted = {name: shapes[name] for name, _ in model.named_parameters()}
    _check(checkpoint, wanted, quantized)
    weights = {name: _read(checkpoint, name, dtype, device, shard) for name in wanted}
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _read(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device | str, shard: Shard | None
) -> torch.Tensor:
    if shard is None:
        return checkpoint.copy(name, dtype, device)
    part = shard.cut(name.rpartition(".")[0])[: len(checkpoint.shapes[name])]
    weight = checkpoint.copy(name, dtype, device, part)
    return weight if shard.adds(name) else weight.zero_()


def _put_quantized(
    model: Decoder,
    quantized: QuantizedCheckpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Shard | None = None,
) -> None:
    for module in quantized.modules:
        weight = quantized.read(module)
        if shard is not None:
            weight = part_of(module, weight, *shard.cut(module))
        try:
            model.put_quantized(module, weight.to(device), dtype)
        except InvalidArgumentError as error:
            reason = str(error).rstrip(".")
            raise ModelLoadError(
                f"{module} in {quantized.folder} cannot be a layer of this model ({reason}): put config and weights of "
                "the same model together, or use another one."
            ) from error


def _check(checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]], quantized: QuantizedCheckpoint | None) -> None:
    """Raise ModelLoadError unless the checkpoint has exactly the tensors of the decoder, in its shapes."""
    for name, shape in wanted.items():
        if name not in checkpoint.files:
            raise ModelLoadError(f"tensor {name} is missing from {checkpoint.folder}: download or convert it again.")
        if checkpoint.shapes[name] != shape:
            raise ModelLoadError(
                f"tensor {name} in {checkpoint.files[name]} has shape {list(checkpoint.shapes[name])} and config.json "
                f"asks for {list(shape)}: put config and weights of the same model together."
            )
    read = set() if quantized is None else quantized.tensor_names
    for name in sorted(checkpoint.files.keys() - wanted.keys() - read):
        # Old checkpoints store RoPE's frequencies, which follow from the config.
        if name.endswith("rotary_emb.inv_freq"):
            continue
        # Some store the output matrix although the config says that it is the embedding.
        if name == _HEAD and checkpoint.equal(_HEAD, _EMBEDDING):
            continue
        # GPTQ's first writers store a bias for every layer that they quantise.
        if quantized is not None and name.removesuffix(".bias") in quantized.modules and checkpoint.is_zero(name):
            continue
        raise ModelLoadError(
            f"tensor {name} in {checkpoint.files[name]} has no place in the architecture that config.json names: "
            "put config and weights of the same model together."
        )
