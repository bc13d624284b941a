"""What `vllm-teach tune --steps` writes, and what is told of a file that is not right; the steps are real, and few."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_teach.cli import main
from vllm_teach.errors import CacheError, InvalidArgumentError
from vllm_teach.performance.cost_model import tune
from vllm_teach.performance.cost_model.fit import Fit
from vllm_teach.performance.cost_model.training_steps import Script, Wave
from vllm_teach.performance.machine import Machine, Rate
from vllm_teach.performance.model_shapes import get_model_shape

FEW = tuple(
    Script(f"{count} after {length}", (Wave(0, count, length),), 2)
    for count, length in ((1, 16), (1, 200), (4, 8), (4, 50), (8, 20), (16, 10), (2, 100), (3, 30))
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the file; VLLM_TEACH_HOME would have the kernels built anew in it, too."""
    monkeypatch.setattr(tune, "tuning_file", lambda device: tmp_path / "tuning" / f"{device}-machine.json")
    return tmp_path


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring them takes seconds, and is tested elsewhere."""

    def machine(device: str) -> Machine:
        rates = {"float32": Rate(1e11, 1e11, 1e11, 1)}
        bandwidth = Rate(2e10, 2e10, 2e10, 1)
        return Machine(device, "a processor", 1, "2.11", rates, {}, bandwidth, bandwidth, {"L2": 2**20})

    monkeypatch.setattr(tune, "measure_this_machine", machine)


@pytest.fixture
def fit() -> Fit:
    return tune.tune_steps("tiny", dtype="float32", device="cpu", scripts=FEW, rounds=1, progress=False)


def test_what_was_found_is_kept_and_read_again(fit: Fit, home: Path) -> None:
    assert tune.load_fit("cpu", "float32") == fit
    (file,) = (home / "tuning").glob("*.json")
    assert file.name == "cpu-machine-steps-float32.json"
    assert len(fit.residuals) >= 16
    assert {each.model for each in fit.residuals} == {"tiny"}
    assert fit.provenance["model"] == "tiny"
    assert fit.step_cost(get_model_shape("tiny")).hardware.title == "a processor, 1 thread"


def test_the_table_has_every_point_and_what_is_attained(fit: Fit) -> None:
    text = tune.format_fit(fit)
    for each in fit.residuals:
        assert f"{each.error:+.1%}" in text
        assert each.script in text
    assert f"median error {fit.median_error:.1%}" in text
    assert "matrix products, of memory bandwidth" in text
    assert "of the very steps that it was fitted to" in text
    assert "what a call and what a step costs is not told apart" in text  # the tiny model alone
    two = replace(fit, residuals=(replace(fit.residuals[0], model="another"), *fit.residuals[1:]))
    assert "not told apart" not in tune.format_fit(two)


def test_the_command_prints_and_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    defaults = tune.tune_steps.__kwdefaults__
    monkeypatch.setitem(defaults, "scripts", FEW)
    out = tmp_path / "fit.json"
    command = ["tune", "--steps", "--model", "tiny", "--dtype", "float32", "--rounds", "1", "--quiet"]
    assert main([*command, "--json", str(out)]) == 0
    assert "median error" in capsys.readouterr().out
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["command"].startswith("vllm-teach tune --steps")
    assert Fit.from_json({k: v for k, v in written.items() if k != "command"}) == tune.load_fit("cpu", "float32")


@pytest.mark.parametrize(
    "option", [["--rounds", "2"], ["--json", "x.json"], ["--model", "tiny"], ["--dtype", "float32"]]
)
def test_options_of_steps_alone_are_refused_without_it(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *option]) == 1
    assert "belongs to --steps" in capsys.readouterr().err


def test_without_a_file_the_command_is_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"dtype='bfloat16' has no measured steps .* vllm-teach tune --steps"
    ):
        tune.load_fit("cpu", "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no record of vllm-teach tune --steps"),
        (lambda text: "[]", "is no record"),
        (lambda text: text.replace('"overlap"', '"overlaps"'), "is no record"),
        (lambda text: re.sub(r'"processor": "[^"]*"', '"processor": "another"', text), "recorded on another machine"),
    ],
)
def test_a_file_that_is_not_right_is_refused(fit: Fit, change: object, message: str) -> None:
    path = tune.fit_file("cpu", "float32")
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")  # type: ignore[operator]
    with pytest.raises(CacheError, match=message):
        tune.load_fit("cpu", "float32")


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "tuning").write_text("no folder", encoding="utf-8")
    monkeypatch.setattr(tune.StepTuning, "run_round", lambda *args: pytest.fail("measured"))
    with pytest.raises(CacheError, match="cannot be written"):
        tune.tune_steps("tiny", dtype="float32", device="cpu", scripts=FEW, progress=False)


def test_how_a_folders_weights_are_stored(tmp_path: Path) -> None:
    assert tune.stored_weights("tiny") is None
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 32}}), encoding="utf-8"
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    found = tune.stored_weights(tmp_path)
    assert found is not None
    assert (found.name, found.bits, found.group_size) == ("gptq", 4, 32)  # 3 bits take the room of 4


def test_scripts_beyond_the_models_context_are_left_out_and_named() -> None:
    tuning = tune.StepTuning(
        "tiny", dtype="float32", device="cpu", scripts=(*FEW, Script("long", (Wave(0, 1, 3000),), 2))
    )
    assert tuning.left_out == ("long",)
    assert tuning.num_scripts == len(FEW)
    with pytest.raises(InvalidArgumentError, match="model='tiny' has a context of 512 tokens"):
        tune.StepTuning("tiny", dtype="float32", device="cpu", scripts=(Script("long", (Wave(0, 1, 3000),), 2),))
