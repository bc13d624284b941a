"""Writes a GGUF model as a Hugging Face directory, which the package and `transformers` both read."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from vllm_teach.models.gguf_reader import GGUFModel
from vllm_teach.models.gguf_tokenizer import special_tokens

# Weights are written in files of about this size, so that converting needs no more memory than one of them.
_SHARD_BYTES = 2 * 2**30


def convert_gguf(gguf_path: Path, folder: Path, *, progress: bool = True, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write config, weights, tokenizer and generation settings of the GGUF file into the existing `folder`.

    The weights' dtype is `GGUFModel.storage_dtype`. `progress` draws a bar over the tensors on stderr. Raises
    ModelLoadError for a file that `GGUFModel` cannot read.
    """
    model = GGUFModel(gguf_path)
    config = model.config()
    dtype = model.storage_dtype()
    _write_json(folder / "config.json", {**config, "torch_dtype": str(dtype).removeprefix("torch.")})
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {k: v for k, v in token_ids.items() if v is not None})
    _write_tokenizer(model, folder)
    _write_weights(model, folder, dtype, progress, shard_bytes)


def _write_tokenizer(model: GGUFModel, folder: Path) -> None:
    model.tokenizer().save(str(folder / "tokenizer.json"))
    names = special_tokens(model.fields)
    settings: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; a model's own class would rebuild the pre-tokeniser.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config()["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if "tokenizer.chat_template" in model.fields:
        settings["chat_template"] = model.fields.text("tokenizer.chat_template")
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", names)


def _write_weights(model: GGUFModel, folder: Path, dtype: torch.dtype, progress: bool, shard_bytes: int) -> None:
    files: list[tuple[Path, list[str]]] = []
    shard: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        file = folder / f"shard-{len(files)}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        files.append((file, list(shard)))
        shard.clear()

    names = model.tensor_names()
    for hf_name, name in tqdm(names.items(), desc="convert", unit="tensor", disable=not progress):
        weight = model.read(name).to(dtype)
        if shard and size + weight.nbytes > shard_bytes:
            flush()
            size = 0
        shard[hf_name] = weight
        size += weight.nbytes
        total += weight.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (file, held) in enumerate(files, start=1):
        final = file.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        weight_map.update(dict.fromkeys(held, final.name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
