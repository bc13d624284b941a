"""The committed report of the compiler: of today's sources, and what the compiler says anew where there is one."""

import pytest

from vllm_teach.errors import ResourceNotFoundError
from vllm_teach.kernels import cuda_compiler
from vllm_teach.performance import register_report
from vllm_teach.performance.register_report import (
    ARCHITECTURES,
    COMMAND,
    SOURCES,
    digest,
    measure_registers,
    read_registers,
)

needs_nvcc = pytest.mark.skipif(cuda_compiler.why_not() is not None, reason="there is no nvcc")


def test_it_is_of_the_sources_as_they_are() -> None:
    report = read_registers()
    assert report.sources == {name: digest(name) for name in SOURCES}, f"out of date: run {COMMAND}"
    assert report.compiler.startswith("nvcc ")
    assert {one.arch for one in report.kernels} == set(ARCHITECTURES)
    assert not any(one.spills for one in report.kernels)


@needs_nvcc
def test_the_compiler_says_the_same_again() -> None:
    report = read_registers()
    found = measure_registers(("sm_80",), SOURCES[:1])
    if found.compiler != report.compiler:
        pytest.skip(f"another compiler: {found.compiler}")
    for one in found.kernels:
        assert report.find(one.name, "sm_80") == one
    assert set(found.sources) == {SOURCES[0]}


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(
        ResourceNotFoundError, match=r"name='other' on 'sm_80' was not compiled: choose one of .*plain_add"
    ):
        read_registers().find("other", "sm_80")


def test_no_file(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(register_report, "result_file", lambda: tmp_path / "norm_registers.json")
    with pytest.raises(ResourceNotFoundError, match=f"write it with {COMMAND}"):
        read_registers()


@needs_nvcc
def test_main_writes_what_read_reads(monkeypatch, tmp_path, capsys) -> None:
    report = read_registers()
    monkeypatch.setattr(register_report, "result_file", lambda: tmp_path / "results" / "norm_registers.json")
    monkeypatch.setattr(register_report, "measure_registers", lambda: report)
    register_report.main()
    assert capsys.readouterr().out == f"{len(report.kernels)} kernels by {report.compiler}: norm_registers.json\n"
    assert read_registers() == report
