"""The sweep of `vllm-teach tune`, and the audit of the choices that it leads to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import Causal
from vllm_teach.backends import measured, tuning_file
from vllm_teach.backends.hardware import Hardware
from vllm_teach.backends.measured import Series, kind_of, length_of
from vllm_teach.backends.selection import select_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.tuning_file import load_measurements
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.performance import audit, side_by_side, tuning

SPEC = AttentionSpec(1, 200, 200, 8, 8, 64, torch.float32, "cpu", Causal())
NAMES = ("naive", "sdpa", "memory_efficient")
HARDWARE = Hardware(None, frozenset({"avx2"}))
GRID = tuning.Grid((Series("causal", "float32", 8), Series("decode", "float32", 8)), (64, 256, 1024), (64, 256))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path))


def cost(name: str, q_len: int, kv_len: int) -> float:
    """Seconds that a backend shall take: one starts fast, one grows slowly, one is never the best."""
    pairs = q_len * kv_len
    return {"naive": 1e-5 + 8e-9 * pairs, "sdpa": 2e-4 + 1e-9 * pairs, "memory_efficient": 5e-4 + 9e-9 * pairs}[name]


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Backends that do nothing and a clock that says what `cost` says; returns the calls as they come."""
    calls: list[tuple[str, int, int]] = []

    def do_nothing(name: str) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
            calls.append((name, q.shape[1], k.shape[1]))
            return q

        return run

    def clock(run: Callable[[], object]) -> float:
        run()
        return cost(*calls[-1])

    for name in NAMES:
        monkeypatch.setattr(backends.get(name), "run", do_nothing(name))
    monkeypatch.setattr(side_by_side, "stopwatch", lambda device: clock)
    return calls


def test_the_choice_is_within_a_fifth_of_the_fastest_where_nothing_was_timed(foreseen) -> None:
    found = tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)
    sizes = [90, 140, 180, 400, 700, 3000]
    points = [(Series("causal", "float32", 8), n) for n in sizes]
    verdicts = audit.audit(measurements=found, points=points, names=NAMES, rounds=3)
    assert sum(verdict.ratio <= 1.2 for verdict in verdicts) >= 5
    assert {verdict.choice for verdict in verdicts} == {"naive", "sdpa"}  # there is a crossover, at 165
    for verdict, n in zip(verdicts, sizes, strict=True):
        assert verdict.fastest == min(NAMES, key=lambda name, n=n: cost(name, n, n))
        assert verdict.ratio == pytest.approx(cost(verdict.choice, n, n) / cost(verdict.fastest, n, n))
    asked = {(q, kv) for _, q, kv in foreseen[-3 * 4 * len(sizes) :]}
    assert not asked & {(n, n) for n in GRID.prefill_lengths}


def test_the_sweep_goes_over_the_grid_and_is_read_again(foreseen, tmp_path: Path) -> None:
    found = tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)
    assert {(q, kv) for _, q, kv in foreseen} == {(64, 64), (256, 256), (1024, 1024), (1, 64), (1, 256)}
    (path,) = (tmp_path / "tuning").iterdir()
    assert path == tuning_file.tuning_file("cpu")
    again = load_measurements("cpu")
    assert again.seconds == found.seconds
    assert again.machine == tuning_file.describe_machine("cpu") == found.machine
    assert again is load_measurements("cpu")  # not read a second time
    assert select_backend(SPEC, "measured", usable=NAMES, hardware=HARDWARE).choice == "sdpa"
    table = str(found)
    assert "causal, float32, 8 heads in all" in table
    assert f"n =    256  sdpa {cost('sdpa', 256, 256) * 1e3:.3g} ms" in table


def test_what_would_take_too_long_is_not_timed_at_longer_lengths(foreseen, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "_TOO_LONG", 4 * cost("naive", 256, 256) - 1e-9)
    found = tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)
    by_backend = found.seconds[Series("causal", "float32", 8)]
    assert set(by_backend["naive"]) == {64, 256}
    assert set(by_backend["sdpa"]) == {64, 256, 1024}
    assert found.estimate(replace(SPEC, q_len=1024, kv_len=1024), "naive") > cost("sdpa", 1024, 1024)


def test_a_real_sweep_times_what_runs_here() -> None:
    grid = tuning.Grid(tuple(Series(kind, "float32", 16) for kind in measured.KINDS), (24, 48), (24, 48))
    found = tuning.tune(progress=False, device="cpu", names=["naive", "sdpa"], grid=grid)
    for series in grid.series:
        assert {name: set(points) for name, points in found.seconds[series].items()} == {
            "naive": {24, 48},
            "sdpa": {24, 48},
        }
        assert all(0 < seconds < 10 for points in found.seconds[series].values() for seconds in points.values())
    verdicts = audit.audit(measurements=found, points=[(grid.series[0], 30)], names=["naive", "sdpa"], rounds=2)
    assert verdicts[0].choice in ("naive", "sdpa")
    assert verdicts[0].ratio > 0


@pytest.mark.parametrize("kind", measured.KINDS)
def test_the_calls_are_of_the_kind_they_stand_for(kind: str) -> None:
    series = Series(kind, "float32", 32)
    spec = tuning.make_call(series, 100).spec()
    assert kind_of(spec) == kind
    assert spec.batch * spec.q_heads == 32
    assert length_of(spec) == 100


def test_the_default_grid_has_all_kinds_in_both_dtypes_and_flex_is_left_out_on_a_cpu() -> None:
    grid = tuning.default_grid()
    assert {(series.kind, series.dtype) for series in grid.series} == {
        (kind, dtype) for kind in measured.KINDS for dtype in ("float32", "bfloat16")
    }
    assert "flex" not in tuning.tunable("cpu")
    assert {"naive", "sdpa"} <= set(tuning.tunable("cpu"))


def test_a_name_that_cannot_be_timed_is_refused() -> None:
    unusable = next(name for name, reason in backends.availability().items() if reason is not None)
    with pytest.raises(InvalidArgumentError, match=rf"names holds '{unusable}', which cannot run here \("):
        tuning.tune(progress=False, device="cpu", names=["sdpa", unusable])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": []}, "names is empty"),
        ({"names": "sdpa"}, "names is 'sdpa'; give a list of backends"),
        ({"names": ["fast"]}, "no attention backend 'fast'"),
        ({"device": "tpu"}, "device is 'tpu', where nothing can be timed"),
        ({"device": "cpu:0"}, "device is 'cpu:0'"),
        ({"grid": tuning.Grid(())}, "grid has nothing to time"),
        ({"grid": tuning.Grid(GRID.series, (), ())}, "grid has nothing to time"),
        ({"grid": tuning.Grid(GRID.series, (8, 0))}, "length is 0"),
        ({"grid": tuning.Grid((Series("causal", "float32", 12),), (8,))}, "width is 12; give a multiple of the 8"),
    ],
)
def test_a_sweep_of_nothing_is_refused_and_leaves_the_old_timings(foreseen, arguments, words: str) -> None:
    before = tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)
    with pytest.raises(InvalidArgumentError, match=words):
        tuning.tune(progress=False, **{"device": "cpu", "names": NAMES, "grid": GRID} | arguments)
    assert load_measurements("cpu").seconds == before.seconds


def test_a_gpu_that_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (lambda: tuning.tune(progress=False, device="cuda"), lambda: audit.audit(device="cuda")):
        with pytest.raises(InvalidArgumentError, match="PyTorch sees no CUDA GPU"):
            call()
    with pytest.raises(InvalidArgumentError, match="PyTorch sees no CUDA GPU"):
        select_backend(replace(SPEC, device="cuda"), "measured", hardware=Hardware((8, 0)))


def test_an_interrupt_leaves_the_old_timings_and_nothing_half_written(foreseen, monkeypatch, tmp_path) -> None:
    before = tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)

    def interrupt(run: Callable[[], object]) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "stopwatch", lambda device: interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)
    assert list((tmp_path / "tuning").iterdir()) == [tuning_file.tuning_file("cpu")]
    assert load_measurements("cpu").seconds == before.seconds


def test_a_backend_that_does_not_start_is_left_out_with_a_warning(foreseen, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        raise MissingDependencyError("It does not build.")

    monkeypatch.setattr(backends.get("naive"), "run", fail)
    monkeypatch.setattr(tuning, "tunable", lambda device: list(NAMES))
    with pytest.warns(RuntimeWarning, match=r"The backend naive failed and is not timed\. It does not build\."):
        found = tuning.tune(progress=False, device="cpu", grid=GRID)
    assert all(set(by_backend) == {"sdpa", "memory_efficient"} for by_backend in found.seconds.values())


def test_a_sweep_shows_its_progress(foreseen, capsys) -> None:
    tuning.tune(progress=False, device="cpu", names=NAMES, grid=GRID)
    assert capsys.readouterr().err == ""
    tuning.tune(device="cpu", names=NAMES, grid=GRID)
    shown = capsys.readouterr().err
    assert "tune: 100%" in shown
    assert "decode, n = 256" in shown


def test_an_audit_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="rounds is 0"):
        audit.audit(rounds=0)
    with pytest.raises(InvalidArgumentError, match="names is 'sdpa'"):
        audit.audit(names="sdpa")
