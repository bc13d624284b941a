"""The CUDA norm kernels run without a GPU: `layer_norm.cu` itself, by a C++ compiler and a stand-in for CUDA's runtime.

`cuda_on_cpu/` runs the threads of a block in turns. What that shows is the source's logic: which thread reads and
writes what, the sums across a warp and a block, the choice between wide and narrow loads. What it cannot show is speed
and the GPU's own arithmetic; `test_cuda_norms.py` compares that where there is a GPU.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vllm_teach import resources
from vllm_teach.errors import InvalidArgumentError, VllmTeachError
from vllm_teach.kernels import cuda_norms

EPS = 1e-5
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-x", "c++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC"]

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no C++ compiler {COMPILER!r}")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("cuda") / "norms.so"
    source = resources.folder("kernels") / "cuda" / "layer_norm.cu"
    command = [COMPILER, *FLAGS, "-I", str(Path(__file__).parent / "cuda_on_cpu"), str(source), "-o", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    return ctypes.CDLL(str(path))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(library, kind, x, weight=None, bias=None, residual=None):
    return cuda_norms.launch(library, kind, x, residual, weight, bias, EPS, None)


def exact(kind, x, weight=None, bias=None):
    weight, bias = (None if each is None else each.double() for each in (weight, bias))
    if kind == "rms_norm":
        return F.rms_norm(x.double(), x.shape[-1:], weight, EPS)
    return F.layer_norm(x.double(), x.shape[-1:], weight, bias, EPS)


def plain(kind, x, weight, bias):
    if kind == "rms_norm":  # transformers' rule
        return weight * F.rms_norm(x, x.shape[-1:], eps=EPS)
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def assert_by_the_rule(found, plain, exact):
    """At most twice the error of the plain formula in the same dtype."""
    assert found.dtype == plain.dtype
    error, allowed = ((each.double() - exact).abs().max().item() for each in (found, plain))
    assert error <= 2 * allowed + 1e-5, f"{error:.3g} against {allowed:.3g} of the plain formula"


# 8 halves or 4 floats are one load; 32 of them keep a warp busy, 4,096 halves a whole block of 512 threads.
@pytest.mark.parametrize("size", [1, 7, 64, 257, 576])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cuda_norms.KINDS)
def test_any_size_with_and_without_the_sum(library, kind, dtype, size):
    x, residual = ((2 * torch.randn(3, size) + 1).to(dtype) for _ in range(2))
    weight = (torch.randn(size) + 1).to(dtype)
    bias = torch.randn(size).to(dtype) if kind == "layer_norm" else None
    out, same = run(library, kind, x, weight, bias)
    assert same is x
    assert_by_the_rule(out, plain(kind, x, weight, bias), exact(kind, x, weight, bias))

    total = x + residual
    out, summed = run(library, kind, x, weight, bias, residual)
    assert torch.equal(summed, total)
    assert torch.equal(out, run(library, kind, total, weight, bias)[0])


@pytest.mark.parametrize("size", [4104, 12_300])  # more than a block's threads at once; more than shared memory holds
def test_long_rows(library, size):
    x, residual = torch.randn(2, 2, size)
    weight, bias = torch.randn(2, size)
    for kind, shift in (("layer_norm", bias), ("rms_norm", None)):
        out, total = run(library, kind, x, weight, shift, residual)
        assert torch.equal(total, x + residual)
        assert_by_the_rule(out, plain(kind, total, weight, shift), exact(kind, total, weight, shift))


def test_rows_that_lie_apart_or_are_not_aligned(library):
    wide = torch.randn(3, 100)
    weight, bias = torch.randn(2, 33)[:, 1:].unbind()  # the first starts 4 bytes after a multiple of 16
    for x in (wide[:, 4:36], wide[:, 3:35], wide[::2, :32], wide[:, :96:3], wide.T[:32].T, wide[0, :32]):
        residual = torch.randn(x.shape)
        out, total = run(library, "layer_norm", x, weight, bias, residual)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(out.double(), exact("layer_norm", total, weight, bias), rtol=0, atol=5e-6)
    assert run(library, "rms_norm", wide[:0])[0].shape == (0, 100)


def test_a_negation_that_is_put_off_counts(library):
    x, weight, bias = torch.randn(2, 40), torch.randn(40), torch.randn(40)
    put_off = [torch._neg_view(each) for each in (x, weight, bias)]
    assert torch.equal(run(library, "layer_norm", *put_off)[0], run(library, "layer_norm", -x, -weight, -bias)[0])


def test_without_weight_and_bias(library):
    x = torch.randn(2, 3, 40)
    for kind in cuda_norms.KINDS:
        torch.testing.assert_close(run(library, kind, x)[0].double(), exact(kind, x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_rounds_before_the_weight_as_transformers_does(library, dtype):
    x, weight = torch.randn(4, 96).to(dtype), (torch.randn(96) + 1).to(dtype)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + EPS)
    out = run(library, "rms_norm", x, weight)[0]
    assert (out != weight * normalised.to(dtype)).sum() <= 2  # another order of adding up may tip a rounding
    assert (out != (weight * normalised).to(dtype)).sum() > 20


def test_a_constant_row_is_the_bias_to_the_last_bit(library):
    x = torch.tensor([0.0, 0.1, 1000.1, 1e30, -3e38])[:, None].repeat(1, 48)
    bias = torch.randn(48)
    assert torch.equal(run(library, "layer_norm", x, torch.randn(48), bias)[0], bias.expand(5, 48))


@pytest.mark.parametrize("magnitude", [1e38, 1e30, 4e18, 1e-20])
@pytest.mark.parametrize("kind", cuda_norms.KINDS)
def test_huge_and_tiny_rows(library, kind, magnitude):
    x = torch.rand(2, 132) * magnitude
    out, close = run(library, kind, x)[0], 2e-5 * min(magnitude / EPS**0.5, 1.0)
    torch.testing.assert_close(out.double(), exact(kind, x), rtol=2e-5, atol=close)


def test_a_small_spread_around_a_large_mean(library):
    x = 10_000 + torch.randn(2, 200) * 0.1
    torch.testing.assert_close(run(library, "layer_norm", x)[0].double(), exact("layer_norm", x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", cuda_norms.KINDS)
def test_nan_and_infinity_stay_in_their_row(library, kind):
    x = torch.randn(3, 40)
    x[0, 3], x[2, 39] = torch.nan, torch.inf
    out = run(library, kind, x)[0]
    assert out[0].isnan().all()
    assert out[2].isnan().any()
    assert out[1].isfinite().all()


def test_more_rows_than_a_grid_has_are_refused(library):
    with pytest.raises(
        InvalidArgumentError, match=r"x has shape \[1073741825, 1\]; the kernel takes up to 2\*\*30 rows"
    ):
        run(library, "rms_norm", torch.zeros(1, 1).expand(2**30 + 1, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.tensor(1.0)}, r"x has shape \[\] and dtype torch.float32; give \[..., size\]"),
        ({"x": torch.zeros(2, 8).double()}, r"dtype torch.float64; give \[..., size\] in float16, bfloat16 or float32"),
        ({"residual": torch.zeros(1, 8)}, r"residual has shape \[1, 8\] and x \[2, 8\]; give residual as \[2, 8\]"),
        ({"weight": torch.zeros(7)}, r"weight has shape \[7\]"),
        ({"bias": torch.zeros(8).half()}, r"bias is torch.float16 on cpu and x torch.float32 on cpu; make them equal"),
        ({"weight": torch.zeros(8, device="meta")}, r"weight is torch.float32 on meta"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(library, changes, words):
    with pytest.raises(InvalidArgumentError, match=words):
        run(library, "layer_norm", **{"x": torch.zeros(2, 8)} | changes)


def test_what_cuda_says_becomes_a_typed_error(library, monkeypatch):
    monkeypatch.setattr(cuda_norms, "DTYPES", (None, None, None, torch.float32))  # a number that the launch refuses
    with pytest.raises(VllmTeachError, match=r"did not start the norm of x, of shape \[2, 8\]: invalid argument\."):
        run(library, "rms_norm", torch.zeros(2, 8))
