"""Building the CPU kernels: once for all processes, and a plain reason where it cannot be built.

A source of one line stands in for a kernel, so that a build takes a second.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_teach import resources
from vllm_teach.backends import cpu
from vllm_teach.errors import MissingDependencyError
from vllm_teach.kernels import cpu_build, cpu_library

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
has_compiler = cpu_build._compiler_problem(os.environ.get("CXX", "c++"), os.environ.get("PATH", "")) is None


@pytest.fixture(autouse=True)
def _own_cache_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cpu_build, "_failures", {})
    cpu_build._key.cache_clear()
    yield
    cpu_build._key.cache_clear()  # else the next test would build the kernel under the name of a source of one line


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "answer.cpp"
    file.write_text(ANSWER)
    monkeypatch.setattr(cpu_build, "_files", lambda library: [file])
    return file


def expect_failure(words: str) -> None:
    with pytest.raises(MissingDependencyError, match=words) as caught:
        cpu_build.build("attention", "portable")
    assert str(caught.value) == cpu_build.why_not("attention", "portable")
    assert str(caught.value).endswith(".")


def built(folder: Path) -> list[str]:
    beside = (".lock", ".sha256")
    return sorted(file.name for file in (folder / "home" / "kernels").iterdir() if file.suffix not in beside)


def test_a_build_is_announced_and_found_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    path = cpu_build.build("attention", "portable")
    assert ctypes.CDLL(str(path)).answer() == 42
    assert capsys.readouterr().err.startswith("Building the CPU attention kernel for portable (once")
    assert built(tmp_path) == [path.name]
    monkeypatch.setenv("PATH", "")  # now no compiler is needed
    assert cpu_build.why_not("attention", "portable") is None
    assert cpu_build.build("attention", "portable") == path
    assert capsys.readouterr().err == ""


def test_another_source_is_another_library(source: Path) -> None:
    before = cpu_build.library_path("attention", "portable")
    assert cpu_build.library_path("attention", "avx2") != before
    assert cpu_build.library_path("norms", "portable") != before
    source.write_text(ANSWER.replace("42", "43"))
    cpu_build._key.cache_clear()
    assert cpu_build.library_path("attention", "portable") != before


def test_a_source_edited_after_it_was_looked_at_is_not_built_under_its_old_name(source: Path, tmp_path: Path) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    assert cpu_build.why_not("attention", "portable") is None  # the name is known from here on
    source.write_text(ANSWER.replace("42", "43"))
    expect_failure("a source was edited since this process began: start it again")
    assert built(tmp_path) == []


def test_a_library_is_made_of_its_own_files_and_the_shared_headers() -> None:
    kernels = resources.folder("kernels") / "cpu"
    assert {folder.name for folder in kernels.iterdir() if folder.is_dir()} == set(cpu_build.LIBRARIES)
    for library in cpu_build.LIBRARIES:
        files = cpu_build._files(library)
        assert {file.parent for file in files} == {kernels, kernels / library}
        assert kernels / "vec.h" in files
        assert any(file.suffix == ".cpp" for file in files)


def test_two_processes_build_once(source: Path, tmp_path: Path) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    code = f"""
import ctypes, pathlib
from vllm_teach.kernels import cpu_build
cpu_build._files = lambda library: [pathlib.Path({str(source)!r})]
print(ctypes.CDLL(str(cpu_build.build("attention", "portable"))).answer())
"""
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in processes]
    assert [out.strip() for out, _ in results] == ["42", "42"]
    assert sum("Building" in errors for _, errors in results) == 1
    assert len(built(tmp_path)) == 1


def test_what_a_dead_builder_left_is_removed(source: Path, tmp_path: Path) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    library = cpu_build.library_path("attention", "portable")
    left_over = library.parent / f"{library.stem}.partial-abc"
    left_over.mkdir(parents=True)
    (left_over / "lock").touch()
    cpu_build.build("attention", "portable")
    assert built(tmp_path) == [library.name]


def test_a_source_that_does_not_compile(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    source.write_text("int answer() { return fourty_two; }\n")
    assert cpu_build.why_not("attention", "portable") is None
    expect_failure(r"could not be built \(.*error: .*fourty_two.*\); the backends sdpa and tiled need no compiler")
    assert built(tmp_path) == []
    capsys.readouterr()
    expect_failure("fourty_two")
    assert capsys.readouterr().err == ""  # not tried again


def test_no_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    expect_failure(r"no C\+\+ compiler 'c\+\+' on the PATH: install g\+\+, or name another one, .* CXX")
    for compiler in ("", "  ", "c++ -O1", str(tmp_path / "no such folder" / "c++")):
        monkeypatch.setenv("CXX", compiler)
        expect_failure(rf"no C\+\+ compiler '{re.escape(compiler)}' on the PATH")


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", "no program at all"])
def test_a_broken_compiler(script: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    expect_failure("the C\\+\\+ compiler '.*broken' fails on one line")


def test_no_ninja(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "works"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "works")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cpu_build.sysconfig, "get_path", lambda name: str(tmp_path))
    expect_failure("ninja is not on the PATH: pip install ninja")


def test_a_cache_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path / "file"))
    expect_failure("could not be built .*file")


def test_a_bare_machine(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TEACH_HOME")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    expect_failure("pip install platformdirs or set VLLM_TEACH_HOME")


@pytest.mark.parametrize("checksum", [None, "0" * 64, "its own"])
def test_a_broken_library_is_reported(checksum: str | None) -> None:
    """One without its checksum or with another one is not loaded at all; one that was never a library cannot be."""
    library = cpu_build.library_path("attention", cpu_library.isa())
    library.parent.mkdir(parents=True)
    library.write_text("not a library")
    if checksum is not None:
        known = cpu_build._checksum(library) if checksum == "its own" else checksum
        library.with_suffix(".sha256").write_text(known)
    words = r"header|too short|file" if checksum == "its own" else "is not what was built"
    cpu_library.load_library.cache_clear()
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(MissingDependencyError, match=rf"cannot be loaded \(.*({words}).*\): delete that file"):
        cpu.run(q, q, q)
    assert "cannot be loaded" in (cpu.unavailable() or "")


def test_a_library_that_was_cut_short_is_not_loaded(source: Path) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    library = cpu_build.build("attention", "portable")
    assert cpu_build.damage(library) is None
    half = library.read_bytes()[: library.stat().st_size // 2]  # which would end the process, were it loaded
    library.unlink()  # what this process has loaded of the whole one must stay in place until it ends
    library.write_bytes(half)
    assert cpu_build.damage(library) == f"{library} is not what was built"
    library.unlink()
    assert cpu_build.damage(cpu_build.build("attention", "portable")) is None


def test_folders_and_compilers_with_spaces_in_their_names(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        return expect_failure("no C\\+\\+ compiler|fails on one line")
    compiler = tmp_path / "my tools" / "g++"
    compiler.parent.mkdir()
    compiler.symlink_to(str(shutil.which(os.environ.get("CXX", "c++"))))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path / "my $home"))
    assert ctypes.CDLL(str(cpu_build.build("attention", "portable"))).answer() == 42
