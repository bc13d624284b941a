"""Triton for notebooks: in a process of its own, as the switch is thrown for good."""

import importlib.util
import os
import subprocess
import sys

import pytest

RUN = """
import torch
from vllm_teach.teaching.interpreter import interpreted_triton
triton, tl = interpreted_triton()

@triton.jit
def double_kernel(x_ptr, out_ptr, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    tl.store(out_ptr + lane, 2 * tl.load(x_ptr + lane))

x = torch.arange(8.0)
out = torch.empty(8)
double_kernel[(1,)](x, out, TILE=triton.next_power_of_2(7))
print(torch.equal(out, 2 * x))
"""
MISSING = "import sys; sys.modules['triton'] = None"


def run(tmp_path, beginning=""):
    script = tmp_path / "script.py"  # Triton reads the kernel's source from its file
    script.write_text(f"{beginning}\n{RUN}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)")
def test_a_kernel_runs_on_the_cpu(tmp_path):
    done = run(tmp_path)
    assert done.stdout == "True\n", done.stderr[-2000:]


def test_without_triton_a_kernel_can_be_written_but_not_started(tmp_path):
    done = run(tmp_path, MISSING)
    assert "MissingDependencyError: Triton is not installed" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)")
def test_a_triton_that_was_imported_before_is_told(tmp_path):
    done = run(tmp_path, "import triton")
    assert "VllmTeachError: Triton was imported before its interpreter was switched on" in done.stderr


def test_importing_the_module_switches_nothing():
    code = "import os, sys, vllm_teach.teaching.interpreter\n"
    code += "print(os.environ.get('TRITON_INTERPRET'), 'triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "None False\n", done.stderr[-2000:]
