"""A run that is killed at any of its steps, or amid the write after it, goes on to the files of one that was not."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("resource", reason="this system limits no file sizes, by which a write is broken off")

# Forks after a whole run, so that all is imported once. Each child kills itself at one of the calls by which Python
# opens or changes a file of the unfinished folder; or, after one that changes it, may write no file of more than 50
# bytes, for which the system kills it amid the next write, be it Python's or safetensors'.
KILLED = """
import os, resource, signal, sys, traceback
import torch
from vllm_teach.models.quantize import quantize_model
from vllm_teach.quantization.quantization_config import QuantizationConfig

source, folder = sys.argv[1:]
changes = ("os.mkdir", "os.rename", "os.remove")

def quantize(output):
    config, ids = QuantizationConfig.choose("awq", group_size=16), torch.arange(60).view(2, 30)
    quantize_model(source, output, config, ids, progress=False)

def quantize_and_die(output, step, amid):
    calls = changes if amid else ("open", *changes)

    def watch(event, arguments):
        nonlocal step
        if event in calls and str(arguments[0]).startswith(output + ".partial"):
            step -= 1
            if step < 0 and not amid:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == -1:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))

    sys.addaudithook(watch)
    quantize(output)

def survives(output, step=10**6, amid=False):
    pid = os.fork()
    if not pid:
        try:
            quantize_and_die(output, step, amid)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, status
    return status == 0

quantize(f"{folder}/whole")
for amid in (False, True):
    for step in range(1000):
        output = f"{folder}/{'amid' if amid else 'at'}-{step}"
        if survives(output, step, amid):
            break
        assert survives(output)
"""


def test_a_killed_run_goes_on_to_the_same_files(tmp_path: Path, tiny_hf: Callable) -> None:
    """By AWQ, whose layers change the norms, too, on which a run goes on."""
    tiny_hf("llama").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    runs = tmp_path / "runs"
    runs.mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "source"), str(runs)]
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    expected = {file.name: file.read_bytes() for file in (runs / "whole").iterdir()}
    folders = sorted(runs.iterdir())
    for folder in folders:
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == expected, folder.name
    # Each of the three weight files is renamed, and so is the manifest before and after each.
    assert sum(folder.name.startswith("at-") for folder in folders) >= 14
    assert sum(folder.name.startswith("amid-") for folder in folders) >= 8
