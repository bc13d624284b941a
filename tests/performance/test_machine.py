import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import machine as module
from vllm_teach.performance.machine import Machine, Rate, device_label, measure_this_machine
from vllm_teach.performance.timing import Timing

MIB = 1024**2


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the clock: every call takes a second, float16 products take 100. Holds the repeats asked for."""
    asked: list[int] = []

    def one_second(fn: Callable[[], object], repeats: int, warmup: int, device: str) -> Timing:
        result = fn()
        asked.append(repeats)
        slow = isinstance(result, torch.Tensor) and result.dtype == torch.float16
        return Timing.of([100.0 if slow else 1.0] * repeats)

    monkeypatch.setattr(module, "time_median", one_second)
    monkeypatch.setattr(module, "_cpu_caches", lambda: {"L1d": 32 * 1024, "L3": 40 * MIB})
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=8192 * MIB))
    return asked


def test_rates_are_work_over_time(timed: list[int]) -> None:
    machine = measure_this_machine(device="cpu")
    assert machine.matmul == dict.fromkeys(("float32", "bfloat16"), Rate(2.0 * 512**3, 2.0 * 512**3, 2.0 * 512**3, 9))
    eight_caches = 8 * 40 * MIB
    assert machine.read_bandwidth.median == eight_caches
    assert machine.copy_bandwidth.median == 2 * eight_caches


def test_a_dtype_far_slower_than_the_first_is_left_out_and_says_so(timed: list[int]) -> None:
    machine = measure_this_machine(device="cpu")
    assert machine.skipped == {"float16": "0.0 GFLOP/s, below a tenth of float32"}
    with pytest.raises(InvalidArgumentError, match=r"'float16' was not measured \(0.0 GFLOP/s, below a tenth"):
        machine.rate("float16")


def test_the_arrays_take_an_eighth_of_the_free_memory_at_most(
    timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * MIB))
    assert measure_this_machine(device="cpu").read_bandwidth.median == 2 * MIB


@pytest.mark.parametrize(("quick", "repeats"), [(True, 9), (False, 25)])
def test_quick_repeats_less(timed: list[int], quick: bool, repeats: int) -> None:
    measure_this_machine(quick=quick, device="cpu")
    # One look at each dtype's size, then float32, bfloat16, reading and copying.
    assert sorted(timed) == [3, 3, 3, repeats, repeats, repeats, repeats]


def test_a_product_grows_until_it_takes_20_ms_or_is_2048_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, width in ((0.02, 512), (0.001, 2048)):
        monkeypatch.setattr(module, "time_median", lambda *_, took=seconds, **__: Timing.of([took]))
        assert module._grown_matmul("cpu", torch.float32)[1:] == (seconds, width)


def test_a_real_measurement_has_a_rate_for_float32_and_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DTYPES", ("float32",))
    monkeypatch.setattr(module, "_cpu_caches", dict)
    machine = measure_this_machine(device="cpu")
    for rate in (machine.matmul["float32"], machine.read_bandwidth, machine.copy_bandwidth):
        assert 0 < rate.low <= rate.median <= rate.high


def test_names_and_settings(timed: list[int]) -> None:
    machine = measure_this_machine(device="cpu")
    assert machine.device == "cpu"
    assert machine.name
    assert machine.threads == torch.get_num_threads()
    assert machine.torch_version == torch.__version__
    assert machine.label == device_label("cpu")


def test_to_dict_is_json_and_complete(timed: list[int]) -> None:
    machine = measure_this_machine(device="cpu")
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
        "skipped": {"float16": "too slow"},
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
    assert "matrix multiply, float16   not measured: too slow" in lines
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
    with pytest.raises(InvalidArgumentError, match="device='cuda' has no name here"):
        device_label("cuda")
    with pytest.raises(InvalidArgumentError, match="device='tpu'"):
        measure_this_machine(device="tpu")
