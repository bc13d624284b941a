"""The Triton norm kernels compiled for three generations of GPUs, and run on one where there is one."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)"
)

# In a process of its own, which has no interpreter switched on; prints one line for each compiled kernel.
COMPILE = """
import json
import torch
from vllm_teach.kernels.triton_kernels.ahead_of_time import compile_kernel
from vllm_teach.kernels.triton_kernels.layer_norm import layer_norm_kernel
from vllm_teach.kernels.triton_kernels.norm_rows import LARGEST_SIZE, warps
from vllm_teach.kernels.triton_kernels.rms_norm import rms_norm_kernel

everything = {"HAS_WEIGHT": True, "HAS_BIAS": True, "ADD": True}
nothing = dict.fromkeys(everything, False)
cases = [(sm, torch.bfloat16, 2048, everything) for sm in (80, 90, 100)]
cases += [(80, torch.float32, 1024, nothing), (90, torch.float16, LARGEST_SIZE, everything)]
for kernel in (layer_norm_kernel, rms_norm_kernel):
    for sm, dtype, tile, flags in cases:
        constants = {"TILE": tile} | {name: flag for name, flag in flags.items() if name in kernel.arg_names}
        compiled = compile_kernel(kernel, dtype, sm, constants, warps=warps(tile))
        print(json.dumps({"kernel": kernel.__name__, "sm": sm, "dtype": str(dtype), "tile": tile, "ptx": compiled.ptx}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_both_compile_for_every_generation_and_dtype(compiled):
    assert len(compiled) == 10
    for one in compiled:
        assert f".target sm_{one['sm']}" in one["ptx"], one
    assert {one["dtype"] for one in compiled} == {"torch.float16", "torch.bfloat16", "torch.float32"}


def test_a_row_is_read_once_and_in_the_widest_loads(compiled):
    """4 warps of 32 threads hold 8 elements each of 1,024: two loads of 16 bytes a thread, and no others."""
    one = next(one for one in compiled if one["kernel"] == "rms_norm_kernel" and one["tile"] == 1024)
    loads = [line for line in one["ptx"].splitlines() if "ld.global" in line]
    assert len(loads) == 2
    assert all("ld.global.v4.b32" in line for line in loads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device to run the compiled kernel on")
def test_they_equal_float64_on_a_gpu():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in (1, 33, 576, 2048, 8191, 65_536):
            check_on_a_gpu(size, dtype)


def check_on_a_gpu(size, dtype):
    from vllm_teach.kernels.triton_kernels.layer_norm import add_layer_norm
    from vllm_teach.kernels.triton_kernels.rms_norm import add_rms_norm

    torch.manual_seed(0)
    x, residual = (torch.randn(9, size, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (torch.randn(size, device="cuda").to(dtype) for _ in range(2))
    total = x + residual
    for found, plain, exact in (
        (
            add_layer_norm(x, residual, weight, bias, 1e-5),
            F.layer_norm(total, (size,), weight, bias, 1e-5),
            F.layer_norm(total.double(), (size,), weight.double(), bias.double(), 1e-5),
        ),
        (
            add_rms_norm(x, residual, weight, 1e-5),
            weight * F.rms_norm(total, (size,), eps=1e-5),
            F.rms_norm(total.double(), (size,), weight.double(), 1e-5),
        ),
    ):
        assert torch.equal(found[1], total)
        error, allowed = ((each.double() - exact).abs().max().item() for each in (found[0], plain))
        assert error <= 2 * allowed + 1e-5
