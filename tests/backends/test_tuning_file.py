"""The file of timings: found again by the machine it belongs to, whole or not there, and never trusted blindly."""

import json
import math
import os
import threading
from pathlib import Path

import pytest
import torch

from vllm_teach.backends import tuning_file
from vllm_teach.backends.measured import Measurements, Series
from vllm_teach.backends.selection import select_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.tuning_file import describe_machine, load_measurements, save_measurements
from vllm_teach.errors import CacheError, InvalidArgumentError

SPEC = AttentionSpec(1, 200, 200, 8, 8, 64, torch.float32)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path))
    return tmp_path


def timings(seconds: float = 2e-3) -> Measurements:
    return Measurements(describe_machine("cpu"), {Series("full", "float32", 8): {"sdpa": {200: seconds}}})


def saved(text: str | bytes) -> Path:
    path = tuning_file.tuning_file("cpu")
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_what_was_saved_is_loaded_and_is_plain_json() -> None:
    path = tuning_file.tuning_file("cpu")
    save_measurements(timings(), path)
    found = load_measurements("cpu")
    assert (found.machine, found.seconds) == (timings().machine, timings().seconds)
    assert found is load_measurements("cpu")  # not read a second time
    data = json.loads(path.read_text())
    assert set(data) == {"machine", "series"}
    assert math.isclose(data["series"][0]["seconds"]["sdpa"]["200"], 2e-3)


def test_nothing_measured_says_what_to_run() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^policy is 'measured', .*; run vllm-teach tune first\.$"):
        select_backend(SPEC, "measured")


def row(**changes: object) -> str:
    one = {"kind": "full", "dtype": "float32", "width": 8, "seconds": {"sdpa": {"200": 1e-3}}}
    return json.dumps({"machine": describe_machine("cpu"), "series": [one | changes]})


DAMAGED = {
    "cut": row()[:-9],
    "empty": "",
    "a list": "[]",
    "a row of nothing": '{"machine": {}, "series": [{}]}',
    "a row of a number": '{"machine": {}, "series": [3]}',
    "no machine": '{"series": []}',
    "a machine of a list": '{"machine": ["x"], "series": []}',
    "no text": b"\xff\xfe\x00",
    "nested without end": "[" * 100_000,
    "time 0": row(seconds={"sdpa": {"200": 0}}),
    "time below 0": row(seconds={"sdpa": {"200": -1e-3}}),
    "time NaN": row(seconds={"sdpa": {"200": float("nan")}}),
    "time without end": row(seconds={"sdpa": {"200": float("inf")}}),
    "length 0": row(seconds={"sdpa": {"0": 1e-3}}),
    "length of text": row(seconds={"sdpa": {"long": 1e-3}}),
    "width 0": row(width=0),
    "unknown kind": row(kind="cosal"),
    "unknown dtype": row(dtype="float8"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_named(what: str) -> None:
    saved(DAMAGED[what])
    with pytest.raises(CacheError, match=r"cpu-\w+\.json is no record of vllm-teach tune; .*\.$"):
        load_measurements("cpu")


def test_a_file_from_another_machine_is_not_believed() -> None:
    saved(json.dumps(timings().to_json()).replace("torch 2", "torch 1"))
    with pytest.raises(CacheError, match="was recorded on another machine than this one"):
        load_measurements("cpu")


def test_another_number_of_threads_or_version_has_a_file_of_its_own(monkeypatch) -> None:
    one = tuning_file.tuning_file("cpu")
    assert tuning_file.tuning_file("cpu") == one
    torch.set_num_threads(2)  # the fixture of this folder sets it back
    two = tuning_file.tuning_file("cpu")
    monkeypatch.setattr(tuning_file, "__version__", "0")
    assert len({one, two, tuning_file.tuning_file("cpu")}) == 3


def test_folders_that_cannot_be(home: Path, monkeypatch) -> None:
    path = tuning_file.tuning_file("cpu")
    (home / "tuning").write_text("a file where the folder should be")
    with pytest.raises(CacheError, match=r"cannot be written .*; set VLLM_TEACH_HOME"):
        save_measurements(timings(), path)
    with pytest.raises(CacheError, match=r"cannot be read .*; set VLLM_TEACH_HOME"):
        load_measurements("cpu")
    monkeypatch.setenv("VLLM_TEACH_HOME", "~no-such-user-here/x")
    with pytest.raises(CacheError, match="'~no-such-user-here/x', and there is no such user"):
        load_measurements("cpu")
    monkeypatch.setenv("VLLM_TEACH_HOME", str(home / ("x" * 300)))
    with pytest.raises(CacheError, match="cannot be read"):
        load_measurements("cpu")


def test_a_folder_without_write_permission_is_named_before_anything_is_timed(monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # for root, every folder can be written
    with pytest.raises(CacheError, match="read-only"):
        tuning_file.make_folder(tuning_file.tuning_file("cpu"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_what_stops_the_writing_leaves_the_old_file_alone(error, monkeypatch) -> None:
    path = tuning_file.tuning_file("cpu")
    save_measurements(timings(1e-3), path)

    def stop(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text.encode()[:20])
        raise error

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises((KeyboardInterrupt, CacheError)):
        save_measurements(timings(2e-3), path)
    assert list(path.parent.iterdir()) == [path]
    assert load_measurements("cpu").seconds == timings(1e-3).seconds


def test_many_that_write_at_once_leave_one_whole_file() -> None:
    path, errors = tuning_file.tuning_file("cpu"), []

    def write(seconds: float) -> None:
        try:
            for _ in range(20):
                save_measurements(timings(seconds), path)
        except CacheError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(1e-3 * (i + 1),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(path.parent.iterdir()) == [path]
    assert load_measurements("cpu").seconds in [timings(1e-3 * (i + 1)).seconds for i in range(6)]
