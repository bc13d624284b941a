"""Importing the package, and its bookkeeping rooms, loads no tensor library."""

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "vllm_teach", "vllm_teach.cli", "vllm_teach.counters", "vllm_teach.kvcache.manager",
        "vllm_teach.engine.scheduler", "vllm_teach.engine.request", "vllm_teach.engine.sampling_params",
        "vllm_teach.validation.tables", "vllm_teach.training",
    ],
)  # fmt: skip
def test_import_loads_no_torch(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


ROOMS = [
    "attention", "backends", "engine", "kvcache", "models", "performance", "quantization", "teaching", "training",
    "validation",
]  # fmt: skip


@pytest.mark.parametrize("package", ["vllm_teach", *(f"vllm_teach.{room}" for room in ROOMS)])
def test_public_names_are_found_lazily(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing
