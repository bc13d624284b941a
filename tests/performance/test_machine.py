import json
import time
from pathlib import Path

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import machine as module
from vllm_teach.performance.machine import Machine, Rate, device_label, measure_this_machine
from vllm_teach.performance.timing import Timing


@pytest.fixture(scope="module")
def measured() -> tuple[Machine, float]:
    # The process's own time: other programs may be running. One thread does not wait for others either.
    start = time.process_time()
    return measure_this_machine(quick=True, device="cpu"), time.process_time() - start


def test_rates_are_ordered_and_plausible(measured: tuple[Machine, float]) -> None:
    machine, _ = measured
    assert "float32" in machine.matmul
    for rate in (*machine.matmul.values(), machine.read_bandwidth, machine.copy_bandwidth):
        assert rate.repeats >= 5
        assert rate.low <= rate.median <= rate.high
    # Between the slowest computer that can run this and the fastest there is.
    assert 1e8 < machine.matmul["float32"].high < 1e15
    assert 1e8 < machine.read_bandwidth.high < 1e13


def test_every_dtype_is_measured_or_its_absence_explained(measured: tuple[Machine, float]) -> None:
    machine, _ = measured
    assert set(machine.matmul) | set(machine.skipped) == set(module.DTYPES)
    assert not set(machine.matmul) & set(machine.skipped)
    for dtype, reason in machine.skipped.items():
        assert "GFLOP/s" in reason
        with pytest.raises(InvalidArgumentError, match=dtype):
            machine.rate(dtype)


def test_names_and_settings(measured: tuple[Machine, float]) -> None:
    machine, _ = measured
    assert machine.device == "cpu"
    assert machine.name
    assert machine.threads == torch.get_num_threads()
    assert machine.torch_version == torch.__version__
    assert machine.label == device_label("cpu")


def test_quick_is_quick(measured: tuple[Machine, float]) -> None:
    assert measured[1] < 8


def test_to_dict_is_json_and_complete(measured: tuple[Machine, float]) -> None:
    machine, _ = measured
    read = json.loads(json.dumps(machine.to_dict()))
    assert read["matmul"]["float32"]["median"] == machine.matmul["float32"].median
    assert set(read) == set(Machine.__dataclass_fields__)


def imagined(**changes: object) -> Machine:
    fields: dict[str, object] = {
        "device": "cpu",
        "name": "imagined",
        "threads": 2,
        "torch_version": "2",
        "matmul": {"float32": Rate(200e9, 150e9, 210e9, 5)},
        "skipped": {"float16": "emulated here"},
        "read_bandwidth": Rate(50e9, 45e9, 55e9, 5),
        "copy_bandwidth": Rate(40e9, 40e9, 40e9, 5),
        "caches": {"L3": 1024},
    }
    return Machine(**{**fields, **changes})  # type: ignore[arg-type]


def test_ridge_point_is_rate_over_read_bandwidth() -> None:
    assert imagined().ridge_point("float32") == 4.0


def test_description_names_each_ceiling() -> None:
    lines = imagined().describe().splitlines()
    assert lines[0] == "imagined, 2 threads"
    assert "matrix multiply, float32      200.0 GFLOP/s  (150.0 to 210.0)" in lines
    assert "matrix multiply, float16   not measured: emulated here" in lines
    assert imagined(threads=1).label == "imagined, 1 thread"
    assert imagined(device="cuda").label == "imagined"


def test_rate_divides_the_work_by_each_time() -> None:
    rate = Rate.of(100.0, Timing.of([1.0, 2.0, 4.0]))
    assert (rate.median, rate.low, rate.high, rate.repeats) == (50.0, 25.0, 100.0, 3)


def test_caches_are_read_from_sysfs(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "32768K")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert module._cpu_caches(tmp_path) == {"L1d": 48 * 1024, "L3": 32 * 1024**2}
    assert module._cpu_caches(tmp_path / "absent") == {}


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="device='cuda' is not there"):
        measure_this_machine(device="cuda")
    with pytest.raises(InvalidArgumentError, match="device='tpu'"):
        measure_this_machine(device="tpu")
