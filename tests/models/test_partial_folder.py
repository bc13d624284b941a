import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_teach.errors import CacheError, InvalidArgumentError, ModelLoadError
from vllm_teach.models import partial_folder
from vllm_teach.models.partial_folder import MANIFEST, PartialFolder

RUN = {"bits": 4, "group_size": None, "calibration": {"shape": [2, 8]}}
TENSORS = {"a": torch.arange(4.0)}


def test_the_folder_has_its_name_only_when_it_is_whole(tmp_path):
    output = tmp_path / "deep" / "out"
    with PartialFolder(output, RUN) as folder:
        folder.save_part("a.safetensors", TENSORS, {"layer": 0})
        folder.write_json("config.json", {"n": 1})
        assert not output.exists()
        folder.publish()
    assert sorted(path.name for path in output.iterdir()) == ["a.safetensors", "config.json", MANIFEST]
    assert torch.equal(load_file(output / "a.safetensors")["a"], TENSORS["a"])
    assert json.loads((output / MANIFEST).read_text()) == {"run": RUN, "parts": [{"layer": 0}]}
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_permissions_are_those_of_a_plain_write(tmp_path):
    with PartialFolder(tmp_path / "out", RUN) as folder:
        folder.save_part("a.safetensors", TENSORS, {"layer": 0})
        folder.publish()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "out" / "a.safetensors").stat().st_mode) == 0o666 & ~umask


def test_the_same_run_goes_on_and_another_is_refused_with_the_difference(tmp_path):
    with PartialFolder(tmp_path / "out", RUN) as folder:
        folder.save_part("a.safetensors", TENSORS, {"layer": 0})
    with PartialFolder(tmp_path / "out", dict(reversed(RUN.items()))) as folder:
        assert folder.parts == [{"layer": 0}]
        with folder.opened("a.safetensors") as file:
            assert torch.equal(file.get_tensor("a"), TENSORS["a"])
    with pytest.raises(InvalidArgumentError, match=r"out\.partial holds a run with bits=4, and this one has 3"):
        PartialFolder(tmp_path / "out", {**RUN, "bits": 3}).__enter__()
    with pytest.raises(InvalidArgumentError, match="seed=None, and this one has 1"):
        PartialFolder(tmp_path / "out", {**RUN, "seed": 1}).__enter__()
    with PartialFolder(tmp_path / "out", RUN):  # the refusals have let go of it
        pass


def test_two_at_once_are_refused(tmp_path):
    with (
        PartialFolder(tmp_path / "out", RUN),
        pytest.raises(InvalidArgumentError, match="is being written by another process"),
    ):
        PartialFolder(tmp_path / "out", RUN).__enter__()


def test_a_file_that_breaks_off_has_no_name(tmp_path, monkeypatch):
    def half(tensors: object, file: Path, **_: object) -> None:
        file.write_bytes(b"half")
        raise OSError("No space left on device")

    with PartialFolder(tmp_path / "out", RUN) as folder:
        monkeypatch.setattr(partial_folder, "save_file", half)
        with pytest.raises(CacheError, match="No space left on device"):
            folder.save_part("a.safetensors", TENSORS, {"layer": 0})
        assert folder.parts == []
        assert not (folder.path / "a.safetensors").exists()
        monkeypatch.undo()
        folder.publish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MANIFEST]


@pytest.mark.parametrize("name", ["a.safetensors.tmp", ".tmpH5Ecw6"])
def test_what_a_killed_process_left_amid_a_write_is_not_published(name, tmp_path):
    """safetensors writes under a name of its own first, which once came along."""
    with PartialFolder(tmp_path / "out", RUN) as folder:
        (folder.path / name).write_bytes(b"half")
    with PartialFolder(tmp_path / "out", RUN) as folder:
        folder.publish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MANIFEST]


def test_what_is_there_already_is_never_touched(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidArgumentError, match="is there already"):
        PartialFolder(tmp_path / "out", RUN)
    for name in ("diary.txt", "diary.tmp"):
        mine = tmp_path / f"{name}.partial"
        mine.mkdir()
        (mine / name).write_text("dear diary")
        with pytest.raises(InvalidArgumentError, match=f"is no unfinished run, it has no {MANIFEST}"):
            PartialFolder(tmp_path / name, RUN).__enter__()
        assert (mine / name).read_text() == "dear diary"


@pytest.mark.parametrize(
    "text",
    ["{", "3", "", "{}", '{"run": 3, "parts": []}', '{"run": {}, "parts": [3]}', pytest.param("[" * 10**5, id="deep")],
)
def test_a_damaged_manifest_is_named(text, tmp_path):
    with PartialFolder(tmp_path / "out", RUN) as folder:
        (folder.path / MANIFEST).write_text(text)
    with pytest.raises(ModelLoadError, match=f"{MANIFEST} is damaged"):
        PartialFolder(tmp_path / "out", RUN).__enter__()


def test_a_damaged_file_is_named(tmp_path):
    with PartialFolder(tmp_path / "out", RUN) as folder:
        (folder.path / "a.safetensors").write_bytes(b"\0" * 20)
        with pytest.raises(ModelLoadError, match=r"a\.safetensors is damaged"), folder.opened("a.safetensors"):
            pass


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match=r"output=.*cannot be written"):
        PartialFolder(tmp_path / "file" / "out", RUN).__enter__()


@pytest.mark.parametrize("name", ["y" * 300, "nowhere/..", "a\0b", "a\ud800b"])
def test_a_name_that_no_folder_can_have_is_refused(name, tmp_path):
    with pytest.raises(InvalidArgumentError, match="is no name for a new folder"):
        PartialFolder(tmp_path / name, RUN)
