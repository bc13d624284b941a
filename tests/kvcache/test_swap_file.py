"""One storage a swap file: who comes second is refused and changes nothing, until the first is gone."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.swap_file import SwapFile

IN_USE = r"^swap_file='.*' is in use by another engine, here or in another process: "


@pytest.mark.parametrize("other", ["the same path", "a relative path", "a link", "a link to the folder"])
def test_a_second_one_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "swap")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "folder")
    paths: dict[str, str | Path] = {
        "the same path": tmp_path / "folder" / "swap",
        "a relative path": "folder/../folder/swap",
        "a link": "link",
        "a link to the folder": str(tmp_path / "elsewhere" / "swap"),
    }
    first = SwapFile(tmp_path / "folder" / "swap", 64)
    first.bytes[:] = b"\7" * 64
    with pytest.raises(InvalidArgumentError, match=IN_USE):
        SwapFile(paths[other], 128)
    assert (tmp_path / "folder" / "swap").read_bytes() == b"\7" * 64
    del first
    assert len(SwapFile(paths[other], 128).bytes) == 128
    assert (tmp_path / "folder" / "swap").stat().st_size == 128


def test_one_that_nobody_uses_is_gone_though_its_parts_refer_to_each_other(tmp_path: Path) -> None:
    first = SwapFile(tmp_path / "swap", 64)
    ring: list[object] = [first]
    ring.append(ring)
    gc.disable()
    try:
        del first, ring
        assert len(SwapFile(tmp_path / "swap", 64).bytes) == 64
    finally:
        gc.enable()


def test_it_is_let_go_by_any_thread(tmp_path: Path) -> None:
    held: list[SwapFile] = []
    thread = threading.Thread(target=lambda: held.append(SwapFile(tmp_path / "swap", 64)))
    thread.start()
    thread.join(20)
    held.clear()
    SwapFile(tmp_path / "swap", 64)


def test_another_process_counts_until_it_ends(tmp_path: Path) -> None:
    program = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print('held', "
        "flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "swap.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InvalidArgumentError, match=IN_USE):
            SwapFile(tmp_path / "swap", 64)
        process.kill()
        process.wait(20)
        SwapFile(tmp_path / "swap", 64)


def test_one_that_could_not_be_made_is_not_held(tmp_path: Path) -> None:
    for size in (1 << 60, 1 << 70):  # more than the disk has, and more than it can count
        with pytest.raises(InvalidArgumentError, match=r"^swap_file='.*' cannot be made \d+ bytes large") as caught:
            SwapFile(tmp_path / "swap", size)
        assert len(SwapFile(tmp_path / "swap", 64).bytes) == 64
        assert caught.value.__traceback__ is not None  # it refers to what could not be made


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with a name")
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    """To open a pipe for writing would wait for somebody who reads it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", "/dev/null", "."):
        with pytest.raises(InvalidArgumentError, match=r"^swap_file='.*' is a folder, a device or a pipe: "):
            SwapFile(path, 64)
    assert not list(tmp_path.glob("*.lock"))


def test_a_link_to_nothing_makes_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "swap")
    assert len(SwapFile(tmp_path / "link", 64).bytes) == 64
    assert (tmp_path / "swap").stat().st_size == 64
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^swap_file='.*' is no name that a file can have \("):
        SwapFile(name, 64)


@pytest.mark.parametrize("path", ["missing/swap", "loop"])
def test_a_file_that_cannot_be_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InvalidArgumentError, match=rf"^swap_file='.*{path}' cannot be made 64 bytes large \("):
        SwapFile(tmp_path / path, 64)
