"""The script that measures a GPU, without one: its whole logic, by a dry run in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.validation import gpu
from vllm_teach.validation.gpu import script
from vllm_teach.validation.gpu.result import load_result
from vllm_teach.validation.gpu.setting import Setting

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)"
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

# What the script must do without: everything that is installed beside what its docstring names and what those need.
ABSENT = ("psutil", "tqdm", "platformdirs", "gguf", "fastapi", "ray", "xformers", "flash_attn", "ipywidgets")
HIDE = """
import sys
from importlib.machinery import PathFinder

class Without:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

    find_distributions = staticmethod(PathFinder.find_distributions)

sys.meta_path = [Without() if finder is PathFinder else finder for finder in sys.meta_path]
"""


def without(*packages: str) -> str:
    """Lines of Python after which these packages cannot be imported."""
    return f"HIDDEN = {packages!r}\n{HIDE}"


def run_script(*arguments: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Run it in a new process from the repository's root, after some lines of Python."""
    code = f"{before}\nfrom vllm_teach.validation import gpu\n{after}\nraise SystemExit(gpu.main({list(arguments)!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """One dry run of all sections with the packages hidden, and what it wrote."""
    folder = tmp_path_factory.mktemp("results")
    run = run_script("--dry-run", "--minutes", "10", "--out", str(folder), before=without(*ABSENT))
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.iterdir()
    return run.stdout, path


@needs_triton
def test_a_dry_run_runs_every_section_and_needs_few_packages(dry_run):
    text, path = dry_run
    content = json.loads(path.read_text())
    assert content["passed"] is True
    assert content["dry_run"] is True
    sections = {section["name"]: section for section in content["sections"]}
    assert list(sections) == [
        "ceilings", "tiles", "attention", "article", "conformance", "other checks", "decode", "density", "window",
        "tile times",
    ]  # fmt: skip
    for section in content["sections"]:
        assert section["failures"] == []
        assert section["not_run"] == []
        assert section["records"] or section["name"] == "tile times"  # the interpreter has nothing to choose from
    assert "All checks passed." in text
    assert f"written to {path}" in text


@needs_triton
def test_a_dry_run_covers_every_kernel_and_writes_what_it_measured(dry_run):
    _, path = dry_run
    content = json.loads(path.read_text())
    records = {section["name"]: section["records"] for section in content["sections"]}
    checked = " ".join(record["name"] for record in records["tiles"])
    for kernel in ("forward", "backward_keys", "backward_queries", "block_sparse", "paged"):
        assert kernel in checked
    conformance = [record["name"] for record in records["conformance"]]
    assert any("varlen" in name for name in conformance)
    assert any("paged" in name for name in conformance)
    assert any(record["gradients"] for record in records["conformance"])
    timed = [record for record in records["attention"] if record["kind"] == "time"]
    assert {record["implementation"] for record in timed} == {"triton", "sdpa math", "naive"}
    assert {record["direction"] for record in timed} == {"forward", "forward + backward"}
    for record in timed:
        assert record["low_ms"] <= record["median_ms"] <= record["high_ms"]
        assert record["tflops"] >= 0
    article = {record["implementation"]: record for record in records["article"]}
    assert article["naive"]["peak_memory_bytes"] > article["triton"]["peak_memory_bytes"] > 0
    assert article["naive"]["modelled_bytes"] > 0
    assert article["block-sparse, half"]["share_of_pairs"] == pytest.approx(0.5, abs=0.1)
    assert {"gb_per_s", "batch", "kv_len"} <= set(records["decode"][0])
    assert {record["density"] for record in records["density"]} == {1.0, 0.25}
    assert content["command"].endswith(f"--out {path.parent}")
    assert content["machine"]["gpus"] == 0


@needs_triton
def test_the_figures_of_a_dry_run_cannot_be_taken_for_results(dry_run):
    text, path = dry_run
    with pytest.raises(InvalidArgumentError, match="is of a dry run"):
        load_result(path)
    assert "no figure means anything" in text


@needs_triton
def test_a_failure_is_recorded_and_the_other_sections_run(tmp_path):
    break_it = """
from vllm_teach.validation.gpu import ceilings, checks
def broken(setting):
    raise RuntimeError("an illegal memory access")
ceilings.matrix_rate = broken
checks.check_online_softmax = lambda setting: [checks.compared("softmax", float("nan"), 0.1)]
"""
    only = ("--only", "ceilings", "other checks", "window")
    run = run_script("--dry-run", "--out", str(tmp_path), *only, after=break_it)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED: matrix product: RuntimeError: an illegal memory access" in run.stdout
    assert "OFF: softmax: error 1e+30, allowed 0.1" in run.stdout
    (path,) = tmp_path.iterdir()
    ceilings, checks, window = json.loads(path.read_text())["sections"]
    assert "in broken" in ceilings["failures"][0]["traceback"]
    assert [record["name"] for record in ceilings["records"]] == ["copy"]
    assert [record["passed"] for record in checks["records"]] == [False, True]
    assert len(window["records"]) == 2


@needs_triton
def test_a_run_whose_time_is_over_writes_what_it_has(tmp_path):
    run = run_script("--dry-run", "--minutes", "0.001", "--out", str(tmp_path))
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    for section in json.loads(path.read_text())["sections"]:
        assert section["records"] == []
        assert section["not_run"] or section["name"] == "tile times"
    assert "no time was left for" in run.stdout


@needs_no_gpu
def test_without_a_gpu_it_says_so_in_one_sentence(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == (
        "PyTorch sees no CUDA device, and this script measures one; --dry-run runs its code on the CPU.\n"
    )


def test_a_dry_run_without_triton_says_what_to_install():
    run = run_script("--dry-run", before=without("triton"))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "The package triton is not installed; on Linux, pip install triton.\n"


def test_without_triton_it_is_a_missing_dependency(monkeypatch):
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(MissingDependencyError, match="pip install triton"):
        script._prepare(dry_run=True)


def test_it_starts_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "vllm_teach.validation.gpu", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--dry-run" in run.stdout


@needs_triton
def test_wrong_arguments_are_refused_in_one_sentence():
    run = run_script("--dry-run", "--only", "sleep")
    assert run.returncode == 2
    assert run.stderr.startswith("--only names 'sleep'; the sections are ceilings, tiles, ")
    run = run_script("--dry-run", "--minutes", "0")
    assert run.returncode == 2
    assert run.stderr == "--minutes is 0; give a number of minutes up to 60.\n"


def test_a_process_that_has_triton_already_cannot_switch_to_the_interpreter(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    assert gpu.main(["--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("--dry-run needs a process that has not imported triton")
    assert "TRITON_INTERPRET" not in os.environ


def test_a_setting_picks_its_sizes():
    full, quick, dry = Setting("cuda"), Setting("cuda", quick=True), Setting("cpu")
    assert [one.pick(1, 2, 3) for one in (full, quick, dry)] == [1, 2, 3]
    assert (full.dtype, dry.dtype) == (torch.bfloat16, torch.float32)
    assert full.repeats >= 5
    assert quick.repeats >= 5
    assert dry.workers == 0 < full.workers
    assert dry.has_room(1e18)
    first, again, other = dry.randn(3), dry.randn(3), dry.randn(3, seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@needs_triton
def test_the_plan_fills_eight_minutes_and_a_real_run_checks_every_candidate():
    """In this process nothing is interpreted, so the lists are those of a real run; making them needs no GPU."""
    from vllm_teach.kernels.triton_kernels import tuning
    from vllm_teach.validation.gpu import checks
    from vllm_teach.validation.gpu.plan import plan

    setting = Setting("cuda")
    sections = plan(setting)
    assert 400 <= sum(section.seconds for section in sections) <= 480
    names = [item.name for item in checks.tile_items(setting)]
    assert len(set(names)) == len(names)
    for kernel, table in tuning.candidate_table().items():
        for tile in table[2, 128]:
            assert f"{kernel} {tile}, head_dim 128, torch.bfloat16" in names
    rows = [item.name for item in checks.row_items(setting)]
    assert len(rows) > 80
    assert any("bf16" in name for name in rows)
    assert not any("fp64" in name for name in rows)
