"""The CUDA norm kernels as a library: why there is none on this machine, and what it computes where there is a GPU."""

import pytest
import torch
import torch.nn.functional as F

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cuda_build, cuda_compiler, cuda_norms

has_gpu = torch.cuda.is_available()


@pytest.fixture
def _no_library(monkeypatch):
    monkeypatch.setattr(cuda_build, "_failures", [])
    cuda_build.load_library.cache_clear()
    yield
    cuda_build.load_library.cache_clear()


@pytest.mark.usefixtures("_no_library")
@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_without_a_gpu_it_is_a_missing_dependency(monkeypatch):
    x = torch.zeros(2, 8)
    expected = "was built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
    with pytest.raises(MissingDependencyError, match=expected) as caught:
        cuda_norms.norm("layer_norm", x, None, None, None, 1e-5)
    assert str(caught.value) == cuda_norms.unavailable()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert cuda_norms.unavailable() == "PyTorch sees no CUDA device; CUDA kernels run on an NVIDIA GPU alone."


@pytest.fixture
def _pretended_gpu(monkeypatch, tmp_path):
    """A machine that has all but what a test takes away: the build itself fails, as there is no CUDA to link with."""
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))


@pytest.mark.usefixtures("_no_library", "_pretended_gpu")
def test_what_a_build_needs(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cuda_compiler, "why_not", lambda: "No nvcc.")
    assert cuda_build.why_not() == "No nvcc."
    monkeypatch.setattr(cuda_compiler, "why_not", lambda: None)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "name its folder in CUDA_HOME" in cuda_build.why_not()


@pytest.mark.usefixtures("_no_library", "_pretended_gpu")
def test_a_build_that_fails_is_a_missing_dependency_and_not_tried_again(monkeypatch, tmp_path, capsys):
    from torch.utils import cpp_extension

    def fail(**arguments):
        assert arguments["sources"][0].endswith(".cu")
        raise RuntimeError("Error building extension\nnorms.cu(3): error: fourty_two is undefined.\n")

    monkeypatch.setattr(cuda_compiler, "why_not", lambda: None)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/opt/cuda")
    monkeypatch.setattr(cpp_extension, "load", fail)
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match=r"\(norms.cu\(3\): error: fourty_two is undefined\)\.$"):
            cuda_build.load_library()
    assert capsys.readouterr().err.count("Building the CUDA norm kernels") == 1
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".lock"]


@pytest.mark.usefixtures("_no_library", "_pretended_gpu")
def test_another_source_gpu_or_pytorch_is_another_library(monkeypatch):
    paths = {cuda_build.library_path()}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    paths.add(cuda_build.library_path())
    monkeypatch.setattr(torch, "__version__", "9.9")
    paths.add(cuda_build.library_path())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")  # one for those alone would not run here, now or later
    paths.add(cuda_build.library_path())
    monkeypatch.setattr(cuda_build.kernels, "source", lambda name: "another")
    paths.add(cuda_build.library_path())
    assert len(paths) == 5


@pytest.mark.skipif(not has_gpu, reason="PyTorch sees no CUDA device to run the kernels on")
def test_they_equal_float64_on_a_gpu():
    if (reason := cuda_norms.unavailable()) is not None:
        pytest.skip(reason)
    for dtype in cuda_norms.DTYPES:
        for size in (1, 33, 576, 2048, 8191, 65_536):
            check_on_a_gpu(size, dtype)


def check_on_a_gpu(size, dtype):
    torch.manual_seed(0)
    x, residual = (torch.randn(9, size, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (torch.randn(size, device="cuda").to(dtype) for _ in range(2))
    total = x + residual
    layer = cuda_norms.norm("layer_norm", x, residual, weight, bias, 1e-5)
    rms = cuda_norms.norm("rms_norm", x, residual, weight, None, 1e-5)
    double = {"weight": weight.double(), "eps": 1e-5}
    for (found, summed), plain, exact in (
        (
            layer,
            F.layer_norm(total, (size,), weight, bias),
            F.layer_norm(total.double(), (size,), bias=bias.double(), **double),
        ),
        (rms, weight * F.rms_norm(total, (size,), eps=1e-5), F.rms_norm(total.double(), (size,), **double)),
    ):
        assert torch.equal(summed, total)
        error, allowed = ((each.double() - exact).abs().max().item() for each in (found, plain))
        assert error <= 2 * allowed + 1e-5


@pytest.mark.skipif(not has_gpu, reason="PyTorch sees no CUDA device")
def test_a_tensor_on_the_cpu_is_refused():
    if (reason := cuda_norms.unavailable()) is not None:
        pytest.skip(reason)
    with pytest.raises(InvalidArgumentError, match="x is on cpu; move it to a CUDA device"):
        cuda_norms.norm("layer_norm", torch.zeros(2, 8), None, None, None, 1e-5)
