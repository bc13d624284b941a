import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_teach.cli import main
from vllm_teach.validation.audit import experiment as register_module
from vllm_teach.validation.audit.check import at_least
from vllm_teach.validation.audit.experiment import Register
from vllm_teach.validation.audit.finding import Finding, counted
from vllm_teach.validation.audit.lab import Lab


@pytest.fixture
def one_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    register = Register()

    @register.experiment("A-overall", "memory_reduction", at_least("half of it", "saved", 0.5, "exact"))
    def saved(lab: Lab) -> Iterator[Finding]:
        """Count what is saved."""
        yield counted("saved", 0.75 if lab.quick else 0.25, "of all", "made up")

    monkeypatch.setattr(register_module, "load_experiments", lambda: register)
    monkeypatch.setattr("vllm_teach.validation.audit.run.load_experiments", lambda: register)


@pytest.mark.parametrize(("arguments", "verdict"), [(["--quick"], "CONFIRMED"), ([], "CONTRADICTED")])
def test_the_verdict_is_printed(
    arguments: list[str], verdict: str, one_experiment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--quiet", *arguments]) == 0
    out = capsys.readouterr().out
    assert verdict in out
    assert out.splitlines()[-1].startswith("1 rows: 1 ")


def test_the_file_names_the_command(one_experiment: None, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    assert main(["validate", "--quiet", "--quick", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["provenance"]["command"].startswith("vllm-teach validate --quiet --quick --out")


def test_a_bad_ending_is_refused_before_anything_runs(
    one_experiment: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--out", str(tmp_path / "audit.html")]) == 1
    found = capsys.readouterr()
    assert "ends in none of .json, .md" in found.err
    assert found.out == ""


def test_an_unknown_table_is_refused_and_all_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--table", "B-flash"]) == 1
    error = capsys.readouterr().err
    assert "table_id='B-flash' is no reference table" in error
    assert "metrics-to-monitor" in error


def test_an_absent_device_is_refused(one_experiment: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--quiet", "--device", "tpu"]) == 1
    assert "device='tpu'" in capsys.readouterr().err


def test_the_list_names_every_row_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--list", "--table", "B-troubleshooting"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "B-troubleshooting"
    keys = [line.strip() for line in lines[1:] if line.startswith("  ") and not line.startswith("    ")]
    assert keys == ["text_quality_drops", "oom_after_long_running", "same_input_varying_time"]


def test_a_list_is_no_result_to_write(capsys, tmp_path):
    assert main(["validate", "--list", "--out", str(tmp_path / "l.md")]) == 1
    assert "--list measures nothing" in capsys.readouterr().err
