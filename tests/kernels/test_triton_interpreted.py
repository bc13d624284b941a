"""Run the tests in `interpreted/` in a process of their own: Triton decides on import whether it interprets."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)")
def test_the_kernels_in_the_interpreter():
    from vllm_teach.backends import triton_backend

    if (reason := triton_backend._broken_interpreter()) is not None:
        pytest.skip(reason)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(FOLDER)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:]
    summary = run.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed in .*", summary), summary  # none was skipped
    assert int(summary.split()[0]) > 120
