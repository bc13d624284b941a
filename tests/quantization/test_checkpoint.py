"""Checkpoints against a decoder that reads them bit by bit, from the published description of each layout alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from vllm_teach.quantization.checkpoint import QuantizedCheckpoint, pack_weight, read_quantized
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.quantization.quantized_weight import QuantizedWeight

MODULE = "model.layers.0.mlp.up_proj"
CONFIGS = {
    "awq": QuantizationConfig("awq", 4, 16, "awq"),
    **{f"gptq {bits} bits": QuantizationConfig("gptq", bits, 16, "gptq") for bits in (2, 3, 4, 8)},
    "gptq act order": QuantizationConfig("gptq", 4, 16, "gptq", act_order=True),
    **{f"gptq v2 {bits} bits": QuantizationConfig("gptq", bits, 16, "gptq_v2") for bits in (2, 3, 4, 8)},
    **{f"own {bits} bits": QuantizationConfig("rtn", bits, 16) for bits in (2, 3, 4, 8)},
    "own act order": QuantizationConfig("gptq", 3, 16, act_order=True),
    "own whole rows": QuantizationConfig("rtn", 4, None),
}


def random_weight(config: QuantizationConfig, out: int = 32, inputs: int = 64, seed: int = 0) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    groups, top = inputs // (config.group_size or inputs), 2**config.bits
    codes = torch.randint(top, (out, inputs), dtype=torch.uint8, generator=draw)
    least = int(config.layout == "gptq")  # version 1 stores no zero of 0
    zeros = torch.randint(least, top, (out, groups), dtype=torch.uint8, generator=draw)
    zeros[0], zeros[1] = least, top - 1
    order = (torch.randperm(inputs, generator=draw) * groups // inputs).int() if config.act_order else None
    return QuantizedWeight(codes, torch.rand(out, groups, generator=draw).half() + 0.01, zeros, config.bits, order)


def write(folder: Path, config: QuantizationConfig, weight: QuantizedWeight, module: str = MODULE) -> Path:
    tensors = {**pack_weight(module, weight, config), "model.norm.weight": torch.ones(4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config.to_hf()}))
    return folder


def read_bits(words: list[int], first: int, bits: int, word_bits: int) -> int:
    """`bits` bits of a row of words from bit `first` on, each looked up on its own."""
    places = range(first, first + bits)
    return sum((int(words[place // word_bits]) >> place % word_bits & 1) << i for i, place in enumerate(places))


def decoded(folder: Path, module: str) -> np.ndarray:
    """The matrix `[out, in]` in float64, by nothing but the files and the layouts' descriptions."""
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_numpy(folder / "model.safetensors")
    part = {name.removeprefix(f"{module}."): array for name, array in tensors.items() if name.startswith(module)}
    kind, bits = about["quant_method"], about["bits"]
    inputs = {"awq": lambda: len(part["qweight"]), "gptq": lambda: len(part["g_idx"])}.get(
        kind, lambda: part["codes"].shape[1] * 8 // bits
    )()
    size = about["group_size"] if about["group_size"] > 0 else inputs
    scales = part["scales"].astype(np.float64) if kind == "vllm_teach" else part["scales"].astype(np.float64).T
    matrix = np.empty((len(scales), inputs))
    for o in range(len(scales)):
        for i in range(inputs):
            if kind == "awq":
                group, place = i // size, [0, 2, 4, 6, 1, 3, 5, 7].index(o % 8)
                code = int(part["qweight"][i, o // 8]) >> 4 * place & 15
                zero = int(part["qzeros"][group, o // 8]) >> 4 * place & 15
            elif kind == "gptq":
                group = int(part["g_idx"][i])
                code = read_bits(part["qweight"][:, o], i * bits, bits, 32)
                zero = read_bits(part["qzeros"][group], o * bits, bits, 32)
                zero += about["checkpoint_format"] == "gptq"
            else:
                group = int(part["group_of"][i]) if "group_of" in part else i // size
                code = read_bits(part["codes"][o], i * bits, bits, 8)
                zero = read_bits(part["zeros"][o], group * bits, bits, 8)
            matrix[o, i] = scales[o, group] * (code - zero)
    return matrix


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_reads_back_exactly_and_as_an_independent_reader_does(name, tmp_path):
    config = CONFIGS[name]
    weight = random_weight(config)
    write(tmp_path, config, weight)
    back = read_quantized(tmp_path, MODULE)
    for part in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(back, part), getattr(weight, part)), part
    assert torch.equal(back.groups(), weight.groups())
    expected = decoded(tmp_path, MODULE)
    assert expected.std() > 0.1  # the comparison would notice something
    assert np.array_equal(back.dequantize(torch.float64).numpy(), expected)


def test_modules_and_tensors_are_listed(tmp_path):
    config = CONFIGS["gptq 3 bits"]
    checkpoint = QuantizedCheckpoint(write(tmp_path, config, random_weight(config)))
    assert checkpoint.config == config
    assert checkpoint.modules == [MODULE]
    assert checkpoint.tensor_names == {f"{MODULE}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}


def test_several_files_with_an_index(tmp_path):
    config = CONFIGS["awq"]
    write(tmp_path, config, random_weight(config))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    homes = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        homes[name] = f"{number}.safetensors"
        save_file({name: tensor}, tmp_path / homes[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    assert torch.equal(read_quantized(tmp_path, MODULE).codes, random_weight(config).codes)


def test_an_int8_head_beside_four_bits(tmp_path):
    config = QuantizationConfig("rtn", 4, 16, head_bits=8)
    head = random_weight(QuantizationConfig("int8", 8, None))
    write(tmp_path, config, head, "model.embed_tokens")
    back = read_quantized(tmp_path, "model.embed_tokens")
    assert (back.bits, back.num_groups) == (8, 1)
    assert torch.equal(back.codes, head.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_in_another_dtype_are_rounded_to_float16(dtype, tmp_path):
    config = CONFIGS["gptq 4 bits"]
    weight = random_weight(config)
    write(tmp_path, config, weight)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{MODULE}.scales"
    save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    assert torch.equal(read_quantized(tmp_path, MODULE).scales, weight.scales.to(dtype).half())


@pytest.mark.parametrize(
    ("part", "change", "complaint"),
    [
        ("qweight", lambda t: t.long(), "qweight has dtype torch.int64"),
        ("qweight", lambda t: t[:, 0], r"qweight has shape \[8\]: it must have two"),
        ("qweight", lambda t: t[:, 1:], "they must be"),
        ("scales", lambda t: t.int(), "scales has dtype torch.int32"),
        ("scales", lambda t: t.float() * 1e9, "beyond float16"),
        ("scales", lambda t: t * float("nan"), "NaN"),
        ("scales", lambda t: t[1:], "they must be"),
        ("g_idx", lambda t: t + 1, "g_idx has shape"),
        ("g_idx", lambda t: t.float(), "g_idx has dtype"),
        ("qzeros", None, "qzeros is missing"),
    ],
)
def test_a_damaged_module_names_file_and_tensor(part, change, complaint, tmp_path):
    config = CONFIGS["gptq 4 bits"]
    write(tmp_path, config, random_weight(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(f"{MODULE}.{part}")
    if change is not None:
        tensors[f"{MODULE}.{part}"] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        read_quantized(tmp_path, MODULE)
    assert MODULE in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_groups_of_another_size_than_the_config_says_are_refused(tmp_path):
    weight = random_weight(CONFIGS["awq"])
    write(tmp_path, CONFIGS["awq"], weight)
    other = QuantizationConfig("awq", 4, 32, "awq")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": other.to_hf()}))
    with pytest.raises(ModelLoadError, match="scales has 4 groups for 64 inputs, and the config says group_size=32"):
        read_quantized(tmp_path, MODULE)


def test_a_module_that_is_not_quantised_is_refused(tmp_path):
    config = CONFIGS["awq"]
    write(tmp_path, config, random_weight(config))
    with pytest.raises(ModelLoadError, match=r"model\.norm in .*qweight is missing"):
        read_quantized(tmp_path, "model.norm")


def test_an_unquantised_folder_names_the_command(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFoundError, match="vllm-teach quantize"):
        read_quantized(tmp_path, MODULE)


def test_a_file_that_is_cut_or_missing_is_named(tmp_path):
    config = CONFIGS["awq"]
    write(tmp_path, config, random_weight(config))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        read_quantized(tmp_path, MODULE)
    file.unlink()
    with pytest.raises(ModelNotFoundError, match="neither model"):
        read_quantized(tmp_path, MODULE)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"index\.json is damaged"):
        read_quantized(tmp_path, MODULE)
    index.write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match=r"index\.json is damaged"):
        read_quantized(tmp_path, MODULE)
    index.write_text(json.dumps({"weight_map": {f"{MODULE}.qweight": "gone.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors is damaged or missing"):
        read_quantized(tmp_path, MODULE)


def test_a_weight_that_the_layout_cannot_hold_is_refused():
    with pytest.raises(InvalidArgumentError, match="output channels"):
        pack_weight(MODULE, random_weight(CONFIGS["awq"], out=12), CONFIGS["awq"])


def test_an_order_that_the_config_speaks_of_and_no_file_has_is_missed(tmp_path):
    """Taken for runs, its groups would give other weights, and no error."""
    config = QuantizationConfig("gptq", 4, 16, "gptq", act_order=True)
    folder = write(tmp_path, config, random_weight(config))
    tensors = load_file(folder / "model.safetensors")
    for change in ({}, {f"{MODULE}.g_idx": torch.empty(0, dtype=torch.int32)}):
        save_file({**{k: v for k, v in tensors.items() if "g_idx" not in k}, **change}, folder / "model.safetensors")
        with pytest.raises(ModelLoadError, match="g_idx is missing, and the config says desc_act"):
            read_quantized(folder, MODULE)


def test_a_config_that_speaks_of_quantised_weights_where_none_are(tmp_path):
    config = CONFIGS["awq"]
    write(tmp_path, config, random_weight(config))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="quantised by 'awq', its config says, but none of its tensors is"):
        QuantizedCheckpoint(tmp_path)
