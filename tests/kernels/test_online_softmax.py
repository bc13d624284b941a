"""The kernel without a GPU: run in Triton's interpreter, and compiled ahead of time for two generations of GPUs."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)"
)

# A process of its own, because Triton decides between interpreter and compiler when it is imported.
INTERPRET = """
import torch
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels.online_softmax import online_softmax, online_softmax_spec

generator = torch.Generator().manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
    for rows, cols, tile in ((1, 1, 16), (3, 16, 16), (2, 17, 16), (5, 1000, 128), (2, 31, 32), (0, 8, 16)):
        x = (torch.randn(rows, cols, generator=generator) * 10).to(dtype)
        out = online_softmax(x, tile=tile)
        assert out.dtype == dtype and out.shape == x.shape
        torch.testing.assert_close(out, online_softmax_spec(x), rtol=0, atol=tolerance)
        torch.testing.assert_close(out.double(), torch.softmax(x.double(), dim=1), rtol=0, atol=tolerance)

    x = torch.randn(4, 50, generator=generator).to(dtype)
    x[0] = -torch.inf  # a row of nothing
    x[1, :40] = -torch.inf  # whole tiles of nothing, then something
    x[2, 5] = 60_000.0  # far beyond where exp overflows
    out = online_softmax(x, tile=16)
    assert (out[0] == 0).all() and out[2, 5] == 1 and out.isfinite().all()
    torch.testing.assert_close(out[1:].double(), torch.softmax(x[1:].double(), dim=1), rtol=0, atol=tolerance)

    x = torch.randn(6, 40, generator=generator).to(dtype)
    x[0, 3] = torch.nan  # in the first tile
    x[1, 37] = torch.nan  # in the last
    x[2] = torch.nan
    x[3, 20] = torch.inf
    x[4] = -torch.inf
    x[4, 30] = torch.nan  # after tiles of nothing
    for softmax in (lambda x: online_softmax(x, tile=16), online_softmax_spec):
        out = softmax(x)
        assert out[:5].isnan().all() and out[5].isfinite().all()

    every_other = torch.randn(6, 40, generator=generator).to(dtype)[:, ::2]
    out = online_softmax(every_other, tile=16)
    torch.testing.assert_close(out, online_softmax_spec(every_other), rtol=0, atol=tolerance)
    assert torch.equal(online_softmax(torch._neg_view(x[5:])), online_softmax(-x[5:]))
    empty = torch.zeros(3, 0, dtype=dtype)
    assert online_softmax(empty).shape == online_softmax_spec(empty).shape == (3, 0)

good = torch.zeros(2, 3)
bad_calls = [(torch.zeros(3), 16, "shape [3]"), (good.double(), 16, "torch.float64"), (good.to("meta"), 16, "on meta")]
bad_calls += [(good, tile, f"tile is {tile!r}; ") for tile in (24, 0, -8, 2**21, 1.5, 16.0, True, "16", None)]
bad_calls += [(good.bfloat16(), 16, "Triton's interpreter rounds")]
for x, tile, words in bad_calls:
    try:
        online_softmax(x, tile=tile)
    except InvalidArgumentError as error:
        assert words in str(error) and str(error).endswith("."), error
        continue
    raise AssertionError(f"{x} with {tile=} was accepted")
print("interpreted")
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_teach.kernels.triton_kernels.online_softmax import online_softmax_kernel

for capability in (80, 90):
    for dtype in ("fp16", "bf16", "fp32"):
        signature = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_row_stride": "i32", "out_row_stride": "i32"}
        signature |= {"cols": "i32", "TILE": "constexpr"}
        source = ASTSource(online_softmax_kernel, signature=signature, constexprs={"TILE": 1024})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert len(compiled.asm["cubin"]) > 1000
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        print(f"compiled for sm_{capability} in {dtype}")
"""


def run_python(code: str, **environment: str) -> str:
    base = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=base | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_triton
def test_the_kernel_equals_its_specification_in_the_interpreter():
    assert run_python(INTERPRET, TRITON_INTERPRET="1").strip() == "interpreted"


@needs_triton
def test_the_kernel_compiles_for_two_gpu_generations(tmp_path):
    output = run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert output.count("compiled for") == 6


@needs_triton
def test_a_cpu_tensor_without_the_interpreter_is_refused():
    code = """
import torch
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels.online_softmax import online_softmax
try:
    online_softmax(torch.zeros(2, 3))
except InvalidArgumentError as error:
    print(error)
"""
    assert "x is on cpu; move it to a CUDA device" in run_python(code)


def test_without_triton_the_import_says_what_to_install():
    code = """
import sys
sys.modules["triton"] = None
from vllm_teach.errors import MissingDependencyError
try:
    import vllm_teach.kernels.triton_kernels.online_softmax
except MissingDependencyError as error:
    print(error)
"""
    assert 'triton is not installed; on Linux, pip install -e ".[gpu]"' in run_python(code)


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device to run the compiled kernel on")
def test_the_kernel_equals_its_specification_on_a_gpu():
    from vllm_teach.kernels.triton_kernels.online_softmax import DTYPES, online_softmax, online_softmax_spec

    for dtype in DTYPES:
        x = (torch.randn(37, 5000, device="cuda") * 10).to(dtype)
        x[0], x[1, 7], x[2, 4999] = -torch.inf, torch.nan, torch.inf
        expected = online_softmax_spec(x)
        assert expected[1:3].isnan().all()
        close = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps, "equal_nan": True}
        torch.testing.assert_close(online_softmax(x), expected, **close)


@needs_triton
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second CUDA device")
def test_the_kernel_runs_where_its_input_is_and_not_on_the_current_device():
    from vllm_teach.kernels.triton_kernels.online_softmax import online_softmax, online_softmax_spec

    x = torch.randn(5, 300, device="cuda:1")
    with torch.cuda.device(0):
        torch.testing.assert_close(online_softmax(x), online_softmax_spec(x))
