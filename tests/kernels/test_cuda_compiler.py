"""What nvcc makes of the CUDA sources for two generations of GPUs, and how it is found."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from vllm_teach import kernels
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cuda_compiler
from vllm_teach.kernels.cuda_compiler import KernelReport, compile_ptx, compile_report, demangle, parse_report

has_cpp = shutil.which(os.environ.get("CXX", "c++")) is not None
needs_nvcc = pytest.mark.skipif(
    not has_cpp or sys.platform != "linux", reason="nvcc calls a C++ compiler, and its packages are Linux's"
)

TINY = """
__device__ __noinline__ float twice(float x) { return x + x; }
extern "C" __global__ void shared(float* x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = twice(all[63 - threadIdx.x]);
}
template <int kCount> __global__ void __launch_bounds__(1024, 2) crowded(float* x) {
    float held[kCount];
    for (int i = 0; i < kCount; ++i) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < kCount; ++i) x[i * 1024 + threadIdx.x] = held[i] * held[kCount - 1 - i];
}
template __global__ void crowded<64>(float*);
"""


@pytest.fixture(scope="module")
def fused() -> dict[str, list[KernelReport]]:
    return {arch: compile_report(kernels.source("cuda/layer_norm.cu"), arch) for arch in ("sm_80", "sm_90")}


@needs_nvcc
def test_nvcc_comes_with_the_dev_extra():
    assert cuda_compiler.why_not() is None
    assert re.fullmatch(r"\d+\.\d+", cuda_compiler.nvcc_version(cuda_compiler.find_nvcc()))


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_norms_compile_without_spills(arch, fused):
    lanes = {"__half": 8, "__nv_bfloat16": 8, "float": 4}
    assert {report.name for report in fused[arch]} == {
        f"norm_kernel<{dtype}, {norm}, {add}, {count}>"
        for dtype, widest in lanes.items()
        for norm in ("LayerNorm", "RmsNorm")
        for add in ("true", "false")
        for count in (1, widest)
    }
    for report in fused[arch]:
        assert report.arch == arch
        assert not report.spills, report
        assert report.stack_bytes == 0, report
        # Four blocks of 512 threads, the most that a multiprocessor takes, share its 65,536 registers.
        assert 0 < report.registers <= 65_536 // (4 * 512), report


@needs_nvcc
def test_the_plain_kernel_has_a_report_beside_it():
    add, norm = compile_report(kernels.source("cuda/plain_layer_norm.cu"), "sm_80")
    assert (add.name, norm.name) == ("plain_add", "plain_layer_norm")
    assert norm.registers > add.registers > 0
    assert norm.shared_bytes == 256 * 4
    assert not norm.spills


@needs_nvcc
def test_loads_are_as_wide_as_a_row_allows():
    ptx = compile_ptx(kernels.source("cuda/layer_norm.cu"), "sm_80")
    bodies = re.split(r"\.entry ", ptx)[1:]
    wide = [body for body in bodies if re.match(r"\S*Li[48]E", body)]
    assert len(bodies) == 2 * len(wide) == 24
    for body in wide:
        assert re.search(r"ld\.global\.v4\.[buf]32", body), body[:200]
        assert re.search(r"st\.global\.v4\.[buf]32", body), body[:200]
    for body in bodies:
        assert "shfl.sync.bfly" in body, body[:200]


@needs_nvcc
def test_spills_and_shared_memory_are_seen():
    crowded, shared = compile_report(TINY, "sm_80")
    assert (crowded.name, shared.name) == ("crowded<64>", "shared")
    assert crowded.spills
    assert crowded.registers <= 32
    assert crowded.stack_bytes > 0
    assert shared == KernelReport("shared", "sm_80", shared.registers, 0, 0, shared.stack_bytes, 64 * 4)


@needs_nvcc
@pytest.mark.parametrize(
    ("code", "arch", "words"),
    [
        ("__global__ void f() { fourty_two; }", "sm_80", r"does not compile for sm_80: .*fourty_two.* is undefined"),
        ("", "sm_20", "does not compile for sm_20: .*sm_20"),
        ("", "a100", "arch is 'a100'; give one such as 'sm_80'"),
    ],
)
def test_what_does_not_compile(code, arch, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        compile_report(code, arch)
    assert str(caught.value).endswith(".")


PRINTED = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'plain' for 'sm_90'
ptxas info    : Function properties for helper
    32 bytes stack frame, 28 bytes spill stores, 24 bytes spill loads
ptxas info    : Function properties for plain
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 1.5 ms
ptxas info    : Compiling entry function '_Z6kernelILi8EEvPf' for 'sm_90'
ptxas info    : Function properties for _Z6kernelILi8EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers, 376 bytes cmem[0]
"""


def test_a_report_is_read():
    plain, kernel = parse_report(PRINTED)
    assert plain == KernelReport("plain", "sm_90", 40, 4, 12, 8, 1024)
    assert kernel == KernelReport("kernel<8>", "sm_90", 16, 0, 0, 0, 0)
    assert plain.spills
    assert not kernel.spills
    assert list(parse_report("")) == []
    with pytest.raises(InvalidArgumentError, match="does not tell all about the kernel plain"):
        list(parse_report(PRINTED.replace("Used 40 registers", "")))


def test_names_are_made_readable():
    mangled = "_ZN12_GLOBAL__N_111norm_kernelI6__half9LayerNormLb1ELi8EEEv8NormCallb"
    assert demangle(mangled) == "norm_kernel<__half, LayerNorm, true, 8>"
    assert demangle("plain_layer_norm") == "plain_layer_norm"


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_an_nvcc_that_does_not_run_is_passed_over(tmp_path, monkeypatch):
    broken = write_program(tmp_path / "home" / "bin" / "nvcc", "exec /no/such/toolkit/nvcc")
    works = write_program(tmp_path / "path" / "nvcc", "echo Cuda compilation tools, release 12.8, V12.8.93")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(works.parent), prepend=os.pathsep)
    assert cuda_compiler.nvcc_version(broken) is None
    assert cuda_compiler.nvcc_version(works) == "12.8"
    assert cuda_compiler.find_nvcc() == works
    write_program(broken, "echo release 13.0,")
    cuda_compiler._find_nvcc.cache_clear()
    assert cuda_compiler.find_nvcc() == broken
    cuda_compiler._find_nvcc.cache_clear()


def test_without_a_compiler_the_reason_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "there is no 'c++' on the PATH: install g++" in str(cuda_compiler.why_not())
    write_program(tmp_path / "c++", "exit 0")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(cuda_compiler, "_packaged", lambda: None)
    cuda_compiler._find_nvcc.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"No nvcc .* pip install 'cuda-toolkit\[cccl,nvcc\]") as caught:
        compile_report("")
    assert str(caught.value) == cuda_compiler.why_not()
    cuda_compiler._find_nvcc.cache_clear()
