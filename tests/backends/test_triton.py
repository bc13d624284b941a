"""The backend of the Triton kernels: what it refuses and why; and its rows, in a process with Triton's interpreter."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow
from vllm_teach.backends import triton_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

SPEC = AttentionSpec(2, 100, 100, 4, 2, 64, dtype=torch.bfloat16, device="cuda", pattern=Causal())
SINKS = Causal() & (GlobalTokens(4) | LocalWindow(9))
INTERPRETED = Path(__file__).parent / "interpreted_triton"
no_triton = importlib.util.find_spec("triton") is None


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16, "requires_grad": True, "dropout": True, "alibi": True, "softcap": 3.0},
        {"dtype": torch.float32, "head_dim": 256, "layout": "varlen", "requires_grad": True},
        {"head_dim": 1, "pattern": LocalWindow(5, 3)},
        {"layout": "paged", "block_size": 5, "softcap": 3.0, "alibi": True},
        {"pattern": SINKS},
        {"pattern": SINKS, "layout": "paged", "block_size": 16},
    ],
)
def test_what_it_serves(changes):
    assert triton_backend.supports(replace(SPEC, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "triton runs on cuda, and on cpu only with TRITON_INTERPRET=1 set, not on cpu."),
        ({"device": "mps"}, "triton runs on cuda, and on cpu only with TRITON_INTERPRET=1 set, not on mps."),
        ({"dtype": torch.float64}, "triton computes in float16, bfloat16 and float32, not in torch.float64."),
        ({"head_dim": 257}, "triton takes a head_dim up to 256, not 257."),
        ({"layout": "paged", "dropout": True}, "paged caches has no dropout and no backward pass."),
        ({"layout": "paged", "requires_grad": True}, "paged caches has no dropout and no backward pass."),
        ({"pattern": SINKS, "requires_grad": True}, "has no dropout and no backward pass."),
        ({"pattern": SINKS, "dropout": True}, "has no dropout and no backward pass."),
    ],
)
def test_what_it_refuses(changes, reason):
    found = triton_backend.supports(replace(SPEC, **changes))
    assert found is not None
    assert found.endswith(reason)


def test_the_interpreter_serves_the_cpu_but_not_bfloat16(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu = replace(SPEC, device="cpu")
    assert triton_backend.supports(replace(cpu, dtype=torch.float16)) is None
    assert "towards zero" in triton_backend.supports(cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_runs_nothing():
    if no_triton:
        assert "triton is not installed" in triton_backend.unavailable()
    else:
        assert "PyTorch sees no CUDA device; TRITON_INTERPRET=1" in triton_backend.unavailable()
    q = torch.zeros(1, 2, 1, 16)
    with pytest.raises(InvalidArgumentError, match="triton runs on cuda"):
        triton_backend.run(q, q, q)


def test_it_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert 'pip install -e ".[gpu]"' in triton_backend.unavailable()


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: "there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert triton_backend.unavailable() == (
        "The GPU has compute capability 7.5; the kernels need 8.0 (Ampere) or newer."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("CC", "/some/compiler")
    assert triton_backend.unavailable() is None


def test_a_gpu_without_a_c_compiler_is_named(monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: "there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install gcc or clang, or name one in CC" in triton_backend.unavailable()


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.5.2", True)]
)
def test_an_interpreter_that_cannot_loop_is_named(triton, numpy, works, monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: "there")
    for name, version in (("triton", triton), ("numpy", numpy)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = triton_backend.unavailable()
    assert (reason is None) == works
    assert works or "NumPy 2.4" in reason


@pytest.mark.skipif(no_triton, reason="triton is not installed (it exists for Linux only)")
def test_the_conformance_table_in_the_interpreter():
    if (reason := triton_backend._broken_interpreter()) is not None:
        pytest.skip(reason)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(INTERPRETED)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:]
    summary = run.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed in .*", summary), summary  # none was skipped
    assert int(summary.split()[0]) > 50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device to run the kernels on")
def test_a_call_on_a_gpu():
    from vllm_teach.backends.conformance import ROWS, check_forward, check_gradients

    for row in ROWS:
        if row.name in ("causal 40x150 fp32", "varlen causal bf16", "paged decode, blocks of 16 fp16"):
            check_forward(triton_backend.run, row, "cuda")
            if row.has_gradients:
                check_gradients(triton_backend.run, row, "cuda")
