"""Folder to folder: what is written, that it is what the algorithms gave, and that a broken run goes on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from vllm_teach.models.layered import LayeredDecoder
from vllm_teach.models.load import load_model
from vllm_teach.models.partial_folder import MANIFEST
from vllm_teach.models.quantize import quantize_model, read_reports
from vllm_teach.models.quantized_files import QuantizedFiles
from vllm_teach.quantization.calibration import quantize_layers
from vllm_teach.quantization.checkpoint import QuantizedCheckpoint
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.quantization.rounding import quantize_rtn

CONFIGS = {
    "gptq": QuantizationConfig.choose("gptq", group_size=16),
    "gptq 3 bits, act order": QuantizationConfig.choose("gptq", bits=3, group_size=32, act_order=True),
    # So small groups lie on one side of 0 every now and then, and their grid would have a zero of 0.
    "gptq 2 bits, small groups": QuantizationConfig.choose("gptq", bits=2, group_size=8),
    "awq": QuantizationConfig.choose("awq", group_size=16),
    "awq 3 bits": QuantizationConfig.choose("awq", bits=3, group_size=16),
    "awq, int8 head": QuantizationConfig.choose("awq", group_size=16, head_bits=8),
    "rtn": QuantizationConfig.choose("rtn", group_size=32),
    "int8": QuantizationConfig.choose("int8"),
    "int8, int8 head": QuantizationConfig.choose("int8", head_bits=8),
}
IDS = torch.randint(320, (4, 48), generator=torch.Generator().manual_seed(0))


def ids_for(config: QuantizationConfig) -> torch.Tensor | None:
    return IDS if config.method in ("gptq", "awq") else None


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_hf: Callable) -> Path:
    """A tied Llama in bfloat16 with biases, and files beside it of which some belong to a model and some do not."""
    folder = tmp_path_factory.mktemp("source")
    model = tiny_hf("llama", tie_word_embeddings=True, attention_bias=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "notes.txt"):
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_folder_holds_what_the_algorithm_gave(name, source, tmp_path):
    config = CONFIGS[name]
    quantize_model(source, tmp_path / "out", config, ids_for(config), progress=False)
    model = LayeredDecoder(load_model(source, torch.bfloat16))
    expected = list(
        quantize_layers(
            model,
            ids_for(config),
            "rtn" if config.method == "int8" else config.method,
            bits=config.bits,
            group_size=config.group_size,
            symmetric=config.symmetric,
            act_order=config.act_order,
            min_zero=int(config.layout == "gptq"),
        )
    )
    checkpoint, stored = QuantizedCheckpoint(tmp_path / "out"), tensors_of(tmp_path / "out")
    original = tensors_of(source)
    assert checkpoint.config == config
    for result in expected:
        assert len(result.weights) == 7
        for module, weight in result.weights.items():
            back = checkpoint.read(module)
            for part in ("codes", "scales", "zeros"):
                assert torch.equal(getattr(back, part), getattr(weight, part)), (module, part)
            assert torch.equal(back.groups(), weight.groups())
            assert f"{module}.weight" not in stored
    changed = {name: tensor for result in expected for name, tensor in result.tensors.items()}
    plain = original.keys() & stored.keys()
    assert {name for name in original.keys() - plain if not name.startswith("model.layers.")} == (
        {"model.embed_tokens.weight"} if config.head_bits == 8 else set()
    )
    for tensor_name in plain:
        assert torch.equal(stored[tensor_name], changed.get(tensor_name, original[tensor_name])), tensor_name
        assert stored[tensor_name].dtype == torch.bfloat16
    assert bool(changed) == (config.method == "awq")


WAYS = [
    {"method": method, "bits": bits, "group_size": group_size, "head_bits": head_bits, **more}
    for method in ("gptq", "awq", "rtn")
    for bits in (2, 3, 4, 8)
    for group_size in (16, -1)
    for head_bits in (16, 8)
    for more in ({}, {"symmetric": True}, *([{"act_order": True}] if method == "gptq" else []))
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(f"{name}={value}" for name, value in way.items()))
def test_every_way_can_be_written_and_read(way, source, tmp_path):
    """GPTQ in act-order with an int8 head once ended in safetensors' words: three tensors shared memory."""
    config = QuantizationConfig.choose(**way)
    quantize_model(source, tmp_path / "out", config, None if ids_for(config) is None else IDS[:1, :16], progress=False)
    logits = load_model(tmp_path / "out").logits(torch.ones(1, 64))
    assert logits.isfinite().all()


def test_grids_of_gptqs_version_1_have_no_zero_of_0(source, tmp_path):
    """Once they were shifted when they were written: codes lost a step that no error counted, and a run that was taken
    up again went on from other weights than one that had not broken off."""
    config = CONFIGS["gptq 2 bits, small groups"]
    settings = {"bits": 2, "group_size": 8}
    plain = quantize_layers(LayeredDecoder(load_model(source, torch.bfloat16)), IDS, "gptq", **settings)
    assert any((weight.zeros == 0).any() for result in plain for weight in result.weights.values())
    summary = quantize_model(source, tmp_path / "out", config, IDS, progress=False)
    checkpoint = QuantizedCheckpoint(tmp_path / "out")
    assert all((checkpoint.read(module).zeros >= 1).all() for module in checkpoint.modules)
    assert all(report.error <= report.rtn_error for report in summary.reports.values())


def test_an_int8_head_is_a_scale_a_row(source, tmp_path):
    config = CONFIGS["int8, int8 head"]
    quantize_model(source, tmp_path / "out", config, progress=False)
    back = QuantizedCheckpoint(tmp_path / "out").read("model.embed_tokens")
    weight = tensors_of(source)["model.embed_tokens.weight"]
    expected = quantize_rtn(weight, 8, granularity="channel", symmetric=True)
    assert torch.equal(back.codes, expected.codes)
    assert (back.num_groups, back.zeros.unique().tolist()) == (1, [128])
    step = weight.float().abs().amax(1, keepdim=True) / 127.5
    assert bool(((back.dequantize() - weight.float()).abs() <= 0.6 * step).all())


def test_an_untied_head_is_quantised_beside_the_embedding(tmp_path, tiny_hf):
    tiny_hf("llama").save_pretrained(tmp_path / "source")
    config = CONFIGS["int8, int8 head"]
    quantize_model(tmp_path / "source", tmp_path / "out", config, progress=False)
    modules = QuantizedCheckpoint(tmp_path / "out").modules
    assert {"lm_head", "model.embed_tokens"} <= set(modules)
    assert len(modules) == 2 * 7 + 2


def test_config_and_companions(source, tmp_path):
    for name, config in CONFIGS.items():
        out = tmp_path / name
        quantize_model(source, out, config, ids_for(config), progress=False)
        about = json.loads((out / "config.json").read_text())
        assert about.pop("quantization_config") == config.to_hf()
        assert about == json.loads((source / "config.json").read_text())
        legacy = out / "quantize_config.json"
        assert legacy.exists() == (config.layout == "gptq")
        for companion in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
            assert (out / companion).read_text() == f"content of {companion}"
        assert not (out / "notes.txt").exists()
        index = json.loads((out / "model.safetensors.index.json").read_text())
        stored = tensors_of(out)
        assert index["weight_map"].keys() == stored.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())


def test_transformers_understands_the_published_configs(source, tmp_path):
    from transformers import AutoConfig
    from transformers.utils.quantization_config import AwqConfig, GPTQConfig

    for name, kind in (("awq", AwqConfig), ("gptq 3 bits, act order", GPTQConfig)):
        config = CONFIGS[name]
        quantize_model(source, tmp_path / name, config, IDS, progress=False)
        entry = AutoConfig.from_pretrained(tmp_path / name).quantization_config
        understood = kind.from_dict(dict(entry))
        assert (understood.bits, understood.group_size) == (config.bits, config.group_size)
        if config.method == "gptq":
            assert (understood.desc_act, understood.sym) == (True, False)


def test_the_summary_counts_bytes_and_errors(source, tmp_path):
    config = CONFIGS["gptq"]
    summary = quantize_model(source, tmp_path / "out", config, IDS, progress=False)
    stored, original = tensors_of(tmp_path / "out"), tensors_of(source)
    gone = original.keys() - stored.keys()
    assert summary.sizes.matrices_before == sum(original[name].nbytes for name in gone)
    assert summary.sizes.matrices_after == sum(stored[name].nbytes for name in stored.keys() - original.keys())
    assert summary.sizes.model_after == sum(tensor.nbytes for tensor in stored.values())
    assert summary.sizes.model_before == sum(tensor.nbytes for tensor in original.values())
    errors = [report.error for report in summary.reports.values()]
    assert len(errors) == 14
    assert summary.error == pytest.approx(sum(errors) / 14)
    assert 0 < summary.error <= summary.rtn_error
    text = str(summary)
    assert f"{summary.sizes.model_after / 1e6:.1f} MB" in text
    assert "gptq, 4 bits, groups of 16" in text
    assert "other loaders refuse it" not in text


def test_the_summary_counts_where_a_method_was_better_and_not_where_it_was_used(source, tmp_path):
    """AWQ's weights are kept in every layer, and in some they err more than rounding to nearest."""
    summary = quantize_model(source, tmp_path / "out", CONFIGS["awq"], IDS, progress=False)
    errors = [report.rtn_error * share for report, share in zip(summary.reports.values(), (0.9, 1, 1.1), strict=False)]
    reports = {
        name: replace(report, error=error)
        for (name, report), error in zip(summary.reports.items(), errors, strict=False)
    }
    assert "awq was better in 1)" in str(replace(summary, reports=reports))


def test_the_summary_says_what_others_cannot_read(source, tmp_path):
    summary = quantize_model(source, tmp_path / "out", CONFIGS["awq, int8 head"], IDS, progress=False)
    assert "int8 embedding and output matrix" in str(summary)
    assert "Only vllm_teach reads this layout; other loaders refuse it." in str(summary)


@pytest.mark.parametrize("name", ["gptq 2 bits, small groups", "awq", "gptq 3 bits, act order", "int8, int8 head"])
@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_run_that_breaks_off_goes_on_to_the_same_files(name, stop_after, source, tmp_path, monkeypatch):
    config, out = CONFIGS[name], tmp_path / "out"
    quantize_model(source, tmp_path / "whole", config, ids_for(config), progress=False)
    saved, plain_save = [], QuantizedFiles.save_layer

    def save(files: QuantizedFiles, result: object) -> None:
        if len(saved) == stop_after:
            raise KeyboardInterrupt
        plain_save(files, result)
        saved.append(result.layer)

    def stop(files: QuantizedFiles) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(QuantizedFiles, "save_layer", save)
        broken.setattr(QuantizedFiles, "save_rest", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(source, out, config, ids_for(config), progress=False)
    assert not out.exists()
    assert len(json.loads((tmp_path / "out.partial" / MANIFEST).read_text())["parts"]) == stop_after
    saved.clear()
    with monkeypatch.context() as watched:
        watched.setattr(
            QuantizedFiles, "save_layer", lambda files, result: (saved.append(result.layer), plain_save(files, result))
        )
        summary = quantize_model(source, out, config, ids_for(config), progress=False)
    assert saved == list(range(stop_after, 2))
    assert not (tmp_path / "out.partial").exists()
    assert len(summary.reports) == 14
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in out.iterdir())
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_run_goes_on_to_the_same_files_where_norms_are_narrower_than_the_rest(tmp_path, tiny_hf, monkeypatch):
    """AWQ's divided norms were once rounded to what they had been stored in, and the run went on from those."""
    source = tmp_path / "source"
    tiny_hf("llama", tie_word_embeddings=True).save_pretrained(source)
    tensors = {name: t.half() if name.endswith("norm.weight") else t for name, t in tensors_of(source).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantize_model(source, tmp_path / "whole", CONFIGS["awq"], IDS, progress=False)
    plain_save = QuantizedFiles.save_layer

    def save_the_first(files: QuantizedFiles, result: object) -> None:
        if result.layer == 1:
            raise KeyboardInterrupt
        plain_save(files, result)

    with monkeypatch.context() as broken:
        broken.setattr(QuantizedFiles, "save_layer", save_the_first)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(source, tmp_path / "out", CONFIGS["awq"], IDS, progress=False)
    quantize_model(source, tmp_path / "out", CONFIGS["awq"], IDS, progress=False)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_source_that_lacks_a_tensor_is_named_before_anything_is_written(name, source, tmp_path):
    copy = tmp_path / "source"
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({each: t for each, t in tensors_of(source).items() if each != name}, copy / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"tensor {name} is missing from"):
        quantize_model(copy, tmp_path / "out", CONFIGS["rtn"], progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture
def broken_off(source, tmp_path, monkeypatch) -> Path:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(QuantizedFiles, "save_rest", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(source, tmp_path / "out", CONFIGS["gptq"], IDS, progress=False)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("config", "ids", "difference"),
    [
        (QuantizationConfig.choose("gptq", bits=3, group_size=16), IDS, "bits=4, and this one has 3"),
        (QuantizationConfig.choose("gptq", group_size=32), IDS, "group_size=16, and this one has 32"),
        (CONFIGS["gptq"], IDS[:3], "calibration="),
        (CONFIGS["gptq"], IDS.flip(0), "calibration="),
    ],
)
def test_a_run_with_other_settings_does_not_go_on(config, ids, difference, source, broken_off):
    with pytest.raises(InvalidArgumentError, match=difference):
        quantize_model(source, broken_off, config, ids, progress=False)


def test_a_run_from_another_source_does_not_go_on(broken_off, tmp_path, tiny_hf):
    tiny_hf("llama", attention_bias=True).save_pretrained(tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match="source_sha256="):
        quantize_model(tmp_path / "other", broken_off, CONFIGS["gptq"], IDS, progress=False)


def test_an_old_checkpoints_spare_tensors_are_left_out(source, tmp_path):
    tensors = tensors_of(source)
    copy = tmp_path / "source"
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    spare = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file({**tensors, **spare}, copy / "model.safetensors")
    quantize_model(copy, tmp_path / "out", CONFIGS["rtn"], progress=False)
    assert not tensors_of(tmp_path / "out").keys() & spare.keys()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"group_size": 64},
            r"group_size=64 does not cut the 96 inputs of model\.layers\.0\.mlp\.down_proj .* 8 or 16 or 32 or -1",
        ),
        ({"group_size": 4}, "group_size=4"),
    ],
)
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_a_group_size_that_does_not_fit_lists_those_that_do(method, arguments, complaint, source, tmp_path):
    config = QuantizationConfig.choose(method, **arguments)
    with pytest.raises(InvalidArgumentError, match=complaint):
        quantize_model(source, tmp_path / "out", config, IDS, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_shapes_that_a_layout_cannot_hold_are_named_before_anything_runs(tmp_path, tiny_hf):
    tiny_hf("llama", intermediate_size=100).save_pretrained(tmp_path / "source")
    for method, complaint in (("gptq", "multiples of 32"), ("awq", "gate_proj has 100 output channels")):
        config = QuantizationConfig.choose(method, group_size=-1)
        with pytest.raises(InvalidArgumentError, match=complaint):
            quantize_model(tmp_path / "source", tmp_path / "out", config, IDS, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        (None, "calibration_ids is None: 'gptq' learns from"),
        (IDS[0], r"shape \[48\]"),
        (IDS.float(), "dtype torch.float32"),
        (IDS[:0], r"shape \[0, 48\]"),
        (IDS + 320, "this model's ids are 0 to 319"),
        (IDS.repeat(1, 10), "samples of 480 tokens, and the model takes 256"),
    ],
)
def test_calibration_ids_that_cannot_work_are_refused(ids, complaint, source, tmp_path):
    with pytest.raises(InvalidArgumentError, match=complaint):
        quantize_model(source, tmp_path / "out", CONFIGS["gptq"], ids, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_model_is_not_quantised_again(source, tmp_path):
    quantize_model(source, tmp_path / "out", CONFIGS["rtn"], progress=False)
    with pytest.raises(InvalidArgumentError, match=r"quantised already \(rtn, 4 bits\)"):
        quantize_model(tmp_path / "out", tmp_path / "again", CONFIGS["int8"], progress=False)


def test_reports_are_read_from_the_run_that_made_them(source, tmp_path):
    summary = quantize_model(source, tmp_path / "out", CONFIGS["gptq"], IDS, progress=False)
    assert read_reports(source, tmp_path / "out", CONFIGS["gptq"], IDS) == summary.reports
    with pytest.raises(InvalidArgumentError, match=r"out holds a run with calibration=.* delete it, or give another"):
        read_reports(source, tmp_path / "out", CONFIGS["gptq"], IDS[:2])
    with pytest.raises(InvalidArgumentError, match=r"has no quantize\.json"):
        read_reports(source, source, CONFIGS["gptq"], IDS)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    for damage in ({"x": {"eror": 1.0}}, {"x": 3}, 3):
        manifest["parts"][0]["reports"] = damage
        (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(ModelLoadError, match=r"quantize\.json is damaged"):
            read_reports(source, tmp_path / "out", CONFIGS["gptq"], IDS)


def test_a_source_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError):
        quantize_model(tmp_path, tmp_path / "out", CONFIGS["rtn"], progress=False)


@pytest.mark.parametrize("config", [QuantizationConfig.choose("rtn", group_size=-1), CONFIGS["int8, int8 head"]])
@pytest.mark.parametrize("sizes", [{"hidden_size": 12, "head_dim": 8}, {"intermediate_size": 100}])
def test_sizes_that_the_kernels_cannot_read_are_named_before_anything_runs(config, sizes, tmp_path, tiny_hf):
    """Whole rows suit any size, and the folder would be one that nothing can load."""
    tiny_hf("llama", **sizes).save_pretrained(tmp_path / "source")
    with pytest.raises(InvalidArgumentError, match="inputs, and the kernels for quantised weights read 8 at once"):
        quantize_model(tmp_path / "source", tmp_path / "out", config, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
