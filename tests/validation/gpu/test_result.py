import json
from pathlib import Path

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.gpu.result import Result, SectionResult, load_result, result_path, save
from vllm_teach.validation.gpu.table import format_result

MACHINE = {
    "device": "NVIDIA H200", "gpus": 1, "driver": "580.1", "cuda": "13.0", "python": "3.12.3",
    "memory_bytes": 150_000_000_000, "packages": {"torch": "2.11.0", "xformers": None},
}  # fmt: skip
TIME = {
    "kind": "time", "name": "n=512", "implementation": "triton", "median_ms": 0.1234, "low_ms": 0.12, "high_ms": 0.13,
    "tflops": 301.5,
}  # fmt: skip
GOOD = {"kind": "check", "name": "forward", "passed": True, "error": 1e-4, "allowed": 2e-4}


def make(*records: dict, dry_run: bool = False, **rest: object) -> Result:
    section = SectionResult("attention", "beside others", 3.0, list(records), **rest)
    return Result("2026-03-04T05:06:07+00:00", "gpu --quick", "abc", dry_run, 480.0, MACHINE, [section], 12.5)


def test_what_is_written_is_read_back(tmp_path):
    result = make(TIME, GOOD, not_run=["n=1024"])
    path = result_path(tmp_path / "results", result)
    assert path.name == "nvidia-h200-2026-03-04.json"
    save(result, path)
    assert load_result(path) == result
    assert load_result(str(path)).records(kind="time", implementation="triton") == [TIME]
    assert json.loads(path.read_text())["passed"] is True
    assert list(path.parent.iterdir()) == [path]  # nothing half-written beside it


def test_what_failed_is_told():
    assert make(TIME, GOOD).failed() == []
    assert make(TIME, GOOD, not_run=["x"]).passed
    off = GOOD | {"name": "backward", "passed": False}
    failures = [{"item": "decode", "error": "RuntimeError: no", "traceback": "…"}]
    result = make(off, failures=failures)
    assert result.failed() == ["attention: decode", "attention: backward"]
    assert not result.passed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("what"), "has what=None; give one with 'vllm_teach.validation.gpu'"),
        (lambda c: c.update(schema=7), "has schema=7; give one with 1"),
        (lambda c: c.pop("command"), "has no 'command'; run the script again"),
        (lambda c: c["sections"][0].pop("not_run"), "has no 'not_run'"),
        (lambda c: c["machine"].pop("driver"), "has no 'driver' in 'machine'"),
        (lambda c: c["sections"][0]["records"][0].update(kind="guess"), "has the record .*'guess'"),
        (lambda c: c["sections"][0]["records"][0].pop("name"), "it needs a name and a kind"),
        (lambda c: c.update(dry_run=True), "is of a dry run; its figures say nothing about a GPU"),
    ],
)
def test_a_file_that_is_no_result_is_refused(change, words, tmp_path):
    path = tmp_path / "result.json"
    save(make(TIME), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgumentError, match=words):
        load_result(path)


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("[1]", "holds a list; a result is an object")])
def test_other_files_are_refused(text, words, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=words):
        load_result(path)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        load_result(tmp_path / "nowhere.json")


def test_a_number_that_json_does_not_know_is_not_written(tmp_path):
    path = tmp_path / "result.json"
    save(make(TIME), path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(make(TIME | {"median_ms": float("nan")}), path)
    assert load_result(path) == make(TIME)  # what was there stays


def test_the_table_shows_figures_failures_and_what_was_left_out():
    records = [
        TIME,
        TIME | {"implementation": "sdpa flash", "peak_memory_bytes": 2_000_000, "modelled_gb_per_s": 1234.5},
        {"kind": "skipped", "name": "n=512", "implementation": "sdpa cudnn", "reason": "No available kernel."},
        {"kind": "tile", "name": "forward", "tile": "128x64", "chosen": True, "median_ms": 0.5, "does_not_fit": None},
        {"kind": "tile", "name": "forward", "tile": "256x256", "chosen": False, "median_ms": None,
         "does_not_fit": "ptxas fatal"},
        {"kind": "rate", "name": "copy", "gb_per_s": 4300.0, "median_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0},
        GOOD,
        GOOD | {"name": "paged", "passed": False, "error": 0.5},
        {"kind": "check", "name": "same bits", "passed": False, "differing_elements": 3},
    ]  # fmt: skip
    failures = [{"item": "decode", "error": "RuntimeError: no", "traceback": "…"}]
    text = format_result(make(*records, failures=failures, not_run=["n=1024", "n=2048"]))
    assert "NVIDIA H200, 140 GiB, driver 580.1, CUDA 13.0" in text
    assert "torch 2.11.0\n" in text  # and not what is not installed
    assert "1 of 3 checks passed" in text
    assert "OFF: paged: error 0.5, allowed 0.0002" in text
    assert "OFF: same bits: differing_elements 3" in text
    assert "FAILED: decode: RuntimeError: no" in text
    assert "no time was left for 2: n=1024, n=2048" in text
    assert "3 failed: attention: decode; attention: paged; attention: same bits" in text
    line = next(line for line in text.splitlines() if "triton" in line)
    assert "0.1234 ms (0.1200 to 0.1300)    301.5 TFLOP/s" in line
    assert "skipped: No available kernel." in text
    assert "128x64" in text
    assert "0.500 ms  <- chosen" in text
    assert "ptxas fatal" in text
    assert "4300 GB/s" in text
    assert "peak 2 MB" in text
    assert "dry run" not in text
    assert "All checks passed." in format_result(make(TIME, GOOD))
    assert "no figure means anything" in format_result(make(TIME, dry_run=True))


def test_committed_results_can_be_read():
    folder = Path(__file__).parents[3] / "data" / "results"
    for path in folder.glob("*.json"):
        if json.loads(path.read_text()).get("what") == "vllm_teach.validation.gpu":
            assert load_result(path).machine["gpus"] >= 1
