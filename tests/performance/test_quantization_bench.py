"""`vllm-teach bench quantization` on the tiny model: its figures against the quantised folders themselves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_teach import cli
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import load_model, load_tokenizer, resolve_model
from vllm_teach.models.attend import full_causal
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance import quantization_bench
from vllm_teach.performance.quantization_bench import QuantizationBench, bench_quantization, format_quantization
from vllm_teach.performance.quantization_plan import VARIANTS, Variant
from vllm_teach.performance.quantization_result import provenance, read_quantization
from vllm_teach.quantization.checkpoint import QuantizedCheckpoint
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.training import calibration_text, evaluation_text
from vllm_teach.training.calibration_text import calibration_ids
from vllm_teach.training.corpus import Document

NAMES = ("fp32", "bf16", "rtn3", "gptq3", "rtn4, int8 head")
CHOSEN = (
    *(variant for variant in VARIANTS if variant.name in NAMES),
    Variant("rtn4, int8 head", config=QuantizationConfig.choose("rtn", bits=4, head_bits=8)),
)
WINDOW = 64


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """(evaluation `[tokens]`, calibration `[samples, len]`) from the two halves of a lesson's source."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(quantization_bench.__file__).read_text("utf-8") * 2, "utf-8")
    ids = calibration_ids(file, load_tokenizer(resolve_model("tiny")), samples=24, length=32)
    return ids[:12].flatten(), ids[12:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def bench(texts: tuple[Tensor, Tensor], folder: Path) -> QuantizationBench:
    return measure(texts, folder)


def measure(texts: tuple[Tensor, Tensor], folder: Path) -> QuantizationBench:
    sizes = {"window": WINDOW, "rounds": 2, "decode_tokens": 4}
    return bench_quantization("tiny", *texts, folder, variants=CHOSEN, progress=False, **sizes)


def nlls_of(model: Decoder, ids: Tensor) -> Tensor:
    """-ln p of each token but the first, each window's forward pass on its own, steps of three quarters of it."""
    found = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    for start in range(0, len(ids), WINDOW * 3 // 4):
        window = ids[start : start + WINDOW]
        hidden = model(window, torch.arange(len(window)), full_causal())
        scores = model.logits(hidden).float().log_softmax(-1)[:-1].gather(1, window[1:, None])[:, 0]
        places = torch.arange(start + 1, start + len(window))
        new = found[places].isnan()
        found[places[new]] = -scores[new].double()
    return found[1:]


def place(folder: Path, name: str) -> Path:
    return {"rtn3": folder / "rtn3", "gptq3": folder / "gptq3", "rtn4, int8 head": folder / "rtn4-int8-head"}[name]


def test_every_variant_has_a_row(bench: QuantizationBench, texts: tuple[Tensor, Tensor]) -> None:
    assert [row.name for row in bench.rows] == list(NAMES)
    assert (bench.evaluated_tokens, bench.calibration, bench.group_size) == (12 * 32 - 1, (12, 32), 64)
    for row in bench.rows:
        assert (len(row.decode.samples), len(row.speedup.samples)) == (2, 2)
        assert 0 < row.decode.low <= row.decode.median
        assert row.change.low <= row.change.ratio <= row.change.high
    base = bench.row("bf16")
    assert (base.change.ratio, base.change.low, base.change.high) == (1, 1, 1)
    assert base.speedup.samples == (1, 1)
    for row in bench.rows:
        times = zip(base.decode.samples, row.decode.samples, strict=True)
        assert row.speedup.samples == pytest.approx([ours / theirs for ours, theirs in times])


@pytest.mark.parametrize("name", ["bf16", "rtn3", "rtn4, int8 head"])
def test_perplexities_are_those_of_the_folders(
    name: str, bench: QuantizationBench, texts: tuple[Tensor, Tensor], folder: Path
) -> None:
    paths = {"bf16": resolve_model("tiny")}
    model, base = (load_model(paths.get(each) or place(folder, each), torch.bfloat16) for each in (name, "bf16"))
    nlls, reference = nlls_of(model, texts[0]), nlls_of(base, texts[0])
    assert bench.row(name).perplexity == pytest.approx(float(nlls.mean().exp()), rel=1e-3)
    assert bench.row(name).change.ratio == pytest.approx(float((nlls - reference).mean().exp()), rel=1e-3)


def test_bytes_are_those_of_the_weights(bench: QuantizationBench, folder: Path) -> None:
    shape = load_model(resolve_model("tiny")).config
    linear = sum(
        parameter.numel()
        for name, parameter in Decoder(shape).named_parameters()
        if name.startswith("model.layers.") and name.endswith("_proj.weight")
    )
    assert bench.row("bf16").linear_bytes == bench.row("fp32").linear_bytes // 2 == 2 * linear
    assert bench.row("bf16").model_bytes == bench.row("fp32").model_bytes // 2
    # Packed, and not as wide as the codes could be: 4 bits hold 3, and a scale and a zero serve 64 weights.
    assert linear / 2 < bench.row("rtn3").linear_bytes < 0.6 * linear
    whole, head = bench.row("rtn4, int8 head"), bench.row("bf16")
    assert whole.model_bytes - whole.linear_bytes < 0.6 * (head.model_bytes - head.linear_bytes)


def test_errors_and_pairs_are_the_methods_own(bench: QuantizationBench, folder: Path) -> None:
    parts = json.loads((folder / "gptq3" / "quantize.json").read_text())["parts"]
    reports = [report for part in parts for report in part.get("reports", {}).values()]
    row = bench.row("gptq3")
    assert row.error == pytest.approx(sum(report["error"] for report in reports) / len(reports))
    assert row.error < row.rtn_error == pytest.approx(sum(each["rtn_error"] for each in reports) / len(reports))
    assert bench.row("bf16").error is bench.row("fp32").error is None
    assert list(bench.pairs) == ["gptq3 / rtn3"]
    ratio = bench.row("gptq3").perplexity / bench.row("rtn3").perplexity
    assert bench.pairs["gptq3 / rtn3"].ratio == pytest.approx(ratio)


def test_what_is_there_is_used_again_and_says_the_same(
    bench: QuantizationBench, texts: tuple[Tensor, Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization_bench, "quantize_model", lambda *_, **__: pytest.fail("was quantised again"))
    again = measure(texts, folder)
    for one, other in zip(bench.rows, again.rows, strict=True):
        assert (one.perplexity, one.change, one.error, one.rtn_error) == (
            other.perplexity,
            other.change,
            other.error,
            other.rtn_error,
        )


def test_a_folder_of_another_calibration_is_refused(
    bench: QuantizationBench, texts: tuple[Tensor, Tensor], folder: Path
) -> None:
    """It once was taken for the same, and its figures were those of the other text."""
    with pytest.raises(InvalidArgumentError, match=r"rtn3 holds a run with calibration=.*: delete it, or"):
        measure((texts[0], texts[1][:6]), folder)


def test_a_folder_that_no_run_made_is_refused(texts: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    (tmp_path / "rtn3").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"rtn3 has no quantize\.json"):
        measure(texts, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"variants": CHOSEN[:1]}, "variants has no 'bf16'"),
        ({"window": 1}, "window=1 is not valid"),
        ({"rounds": 0}, "rounds=0 measures nothing"),
        ({"decode_tokens": 0}, "decode_tokens=0 is not valid: use a whole number from 1 to 496"),
        ({"decode_tokens": 497}, "decode_tokens=497 is not valid"),
        ({"evaluation_ids": torch.arange(257)}, "tokens=257 are too few"),
        ({"evaluation_ids": torch.ones(2, 300)}, "token_ids has dtype torch.float32"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_quantised(
    arguments: dict, words: str, texts: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    good = {"evaluation_ids": texts[0], "calibration_ids": texts[1], "folder": tmp_path, "progress": False}
    with pytest.raises(InvalidArgumentError, match=words):
        bench_quantization("tiny", **{**good, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_was_not_measured_is_named(bench: QuantizationBench) -> None:
    with pytest.raises(InvalidArgumentError, match="name='awq4' was not measured: use one of 'fp32', 'bf16', 'rtn3'"):
        bench.row("awq4")


def test_the_table(bench: QuantizationBench) -> None:
    text = format_quantization(bench)
    lines = text.splitlines()
    assert "groups of 64, calibrated on 12 x 32 tokens, scored on 383 others" in lines[0]
    assert [line[2:19].strip() for line in lines[4 : 4 + len(NAMES)]] == list(NAMES)
    row, base = bench.row("rtn3"), bench.row("bf16")
    shown = next(line for line in lines if line.startswith("  rtn3"))
    assert f"{row.perplexity:.3f}" in shown
    assert f"{100 * (row.change.ratio - 1):+.2f} %" in shown
    assert f"({100 * (row.change.low - 1):+.2f} % to {100 * (row.change.high - 1):+.2f} %)" in shown
    assert f"{row.linear_bytes / base.linear_bytes:.3f}x" in shown
    assert f"{row.model_bytes / base.model_bytes:.3f}x" in shown
    assert shown.endswith(f"{row.speedup.median:.2f} ({row.speedup.low:.2f} to {row.speedup.high:.2f})")
    assert lines[-1].split("perplexity")[0].strip() == "gptq3 / rtn3"


def test_the_file_gives_the_same_result_back(bench: QuantizationBench, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench.to_json()))
    back = read_quantization(file)
    assert back == bench
    assert format_quantization(back) == format_quantization(bench)
    assert "calibrated on 12 x 32 tokens, scored on 383 others" in provenance(back, file)
    file.write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"file='bench\.json' holds no result"):
        read_quantization(file)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, bench: QuantizationBench) -> dict[str, object]:
    """What the command has measured, once it has been given; nothing is."""
    documents = [Document(f"topics/{i}", f"This is text number {i}. " * 20) for i in range(150)]
    for module in (calibration_text, evaluation_text):
        monkeypatch.setattr(module, "collect_documents", lambda: documents)
    given: dict[str, object] = {}

    def measured(model: str, evaluation: Tensor, calibration: Tensor, folder: Path, **options: object) -> object:
        given.update(model=model, evaluation=evaluation.shape, calibration=calibration.shape, folder=folder, **options)
        return bench

    monkeypatch.setattr(quantization_bench, "bench_quantization", measured)
    return given


def test_the_command(seen: dict[str, object], bench: QuantizationBench, tmp_path: Path, capsys) -> None:
    output = tmp_path / "result.json"
    sizes = ["--samples", "3", "--length", "16", "--tokens", "300", "--window", "32", "--rounds", "2"]
    arguments = ["bench", "quantization", "--model", "tiny", "--folder", str(tmp_path), *sizes]
    assert cli.main([*arguments, "--json", str(output), "--quiet"]) == 0
    assert seen == {
        "model": "tiny",
        "evaluation": (300,),
        "calibration": (3, 16),
        "folder": tmp_path,
        "window": 32,
        "rounds": 2,
        "progress": False,
    }
    assert capsys.readouterr().out == f"{format_quantization(bench)}\n"
    back = read_quantization(output)
    assert back.rows == bench.rows
    assert f"written by `vllm-teach {' '.join(arguments)} --json {output} --quiet`" in provenance(back, output)


@pytest.mark.parametrize(
    ("sizes", "calibration", "evaluation"),
    [([], (8, 128), 1000), (["--samples", "3"], (3, 128), 1000), (["--length", "16", "--tokens", "400"], (8, 16), 400)],
)
def test_a_quick_look_takes_the_sizes_that_are_given(
    sizes: list[str], calibration: tuple[int, int], evaluation: int, seen: dict[str, object]
) -> None:
    """They were once ignored without a word."""
    assert cli.main(["bench", "quantization", "--model", "tiny", "--quick", "--quiet", *sizes]) == 0
    assert (seen["calibration"], seen["evaluation"]) == (calibration, (evaluation,))


def test_the_tiny_models_folders_are_what_the_names_say(bench: QuantizationBench, folder: Path) -> None:
    for variant in CHOSEN:
        if variant.config is not None:
            path = place(folder, variant.name)
            assert QuantizedCheckpoint(path).config == variant.config
            names = {name for file in path.glob("*.safetensors") for name in load_file(file)}
            assert ("model.embed_tokens.weight" in names) == (variant.config.head_bits == 16)
