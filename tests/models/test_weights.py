import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_teach.errors import ModelLoadError, ModelNotFoundError
from vllm_teach.models.weight_files import weight_files
from vllm_teach.models.weights import Checkpoint


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_names_shapes_and_values(sharded, tmp_path, tensors):
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shapes == {"a": (5, 3), "b": (7,)}
    for name, tensor in tensors.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            copied = checkpoint.copy(name, dtype, "cpu")
            assert copied.dtype == dtype
            assert torch.equal(copied, tensor.to(dtype))


def test_copies_do_not_depend_on_the_file(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    copied = Checkpoint(tmp_path).copy("a", torch.float32, "cpu")
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:  # in place: a map of the file would show it
        opened.write(bytes(size))
    assert torch.equal(copied, tensors["a"])


def test_equal_compares_values(tmp_path, tensors):
    save_file({**tensors, "same": tensors["a"].clone(), "other": tensors["a"] + 1}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.equal("a", "same")
    assert not checkpoint.equal("a", "other")


def test_a_folder_without_weights_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match="holds neither"):
        weight_files(tmp_path)


def test_a_missing_shard_is_named(tmp_path, tensors):
    write_shards(tmp_path, tensors)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors is missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json "):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_cut_file_is_named(keep, tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged or cut short"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused_by_name(dtype, tmp_path):
    save_file({"packed": torch.zeros(4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"tensor packed in .*model\.safetensors has dtype {dtype}"):
        Checkpoint(tmp_path).copy("packed", torch.float32, "cpu")
