"""The policy "measured": the sweep, and choices between the measured sizes, by a clock known beforehand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow
from vllm_teach.backends.hardware import Hardware
from vllm_teach.backends.measured import Measurements, Series, interpolate, kind_of, length_of
from vllm_teach.backends.selection import select_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

SPEC = AttentionSpec(1, 200, 200, 8, 8, 64, torch.float32, "cpu", Causal())
NAMES = ("naive", "sdpa", "memory_efficient")
HARDWARE = Hardware(None, frozenset({"avx2"}))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "causal"),
        ({"pattern": None}, "full"),
        ({"pattern": LocalWindow(20)}, "local"),
        ({"pattern": LocalWindow(300)}, "causal"),
        ({"pattern": Causal() & GlobalTokens(150)}, "causal"),
        ({"q_len": 1}, "decode"),
        ({"q_len": 1, "layout": "paged", "block_size": 16}, "paged"),
        ({"layout": "paged", "block_size": 16}, "causal"),
    ],
)
def test_kinds(change: dict[str, Any], kind: str) -> None:
    assert kind_of(replace(SPEC, **change)) == kind


def test_lengths() -> None:
    assert length_of(replace(SPEC, q_len=1, kv_len=77)) == 77
    assert length_of(replace(SPEC, q_len=100, kv_len=400)) == 200


def test_interpolation_is_exact_for_powers_and_goes_on_behind_the_end() -> None:
    points = {n: 3e-9 * n**1.7 for n in (64, 256, 1024)}
    for n in (64, 100, 256, 1000, 5000):
        assert interpolate(points, n) == pytest.approx(3e-9 * n**1.7)
    assert interpolate(points, 10) == points[64]
    assert interpolate({64: 2.0}, 999) == 2.0
    bent = {64: 1e-3, 256: 1e-3, 1024: 16e-3}
    assert interpolate(bent, 128) == pytest.approx(1e-3)
    assert interpolate(bent, 512) == pytest.approx(4e-3)


def measurements(**seconds: dict[int, float]) -> Measurements:
    return Measurements({"processor": "x"}, {Series("causal", "float32", 8): seconds})


def test_the_account_names_times_and_what_was_not_timed() -> None:
    found = measurements(naive={200: 3e-3}, sdpa={200: 2e-3})
    selection = select_backend(SPEC, "measured", usable=NAMES, hardware=HARDWARE, measurements=found)
    assert selection.choice == "sdpa"
    assert selection.reason == (
        "About 2 ms, the fastest by the timings of this machine (causal, float32, 8 heads in all)."
    )
    assert selection.others["naive"] == "It takes 1.5 times as long."
    assert selection.others["memory_efficient"] == "It was not timed."


@pytest.mark.parametrize("change", [{"requires_grad": True}, {"pattern": None}, {"dtype": torch.bfloat16}])
def test_what_is_like_nothing_timed_is_said_and_decided_by_the_threshold(change: dict[str, Any]) -> None:
    spec = replace(SPEC, **change)
    found = measurements(naive={200: 1e-3}, sdpa={200: 2e-3})
    selection = select_backend(spec, "measured", usable=NAMES, hardware=HARDWARE, measurements=found)
    by_threshold = select_backend(spec, usable=NAMES, hardware=HARDWARE)
    assert selection.choice == by_threshold.choice == "sdpa"
    assert selection.reason == f"Nothing like this call was timed, so the threshold decides: {by_threshold.reason}"


def test_wider_calls_take_the_nearest_width_in_proportion() -> None:
    seconds = {
        Series("causal", "float32", 8): {"sdpa": {200: 1e-3}},
        Series("causal", "float32", 32): {"sdpa": {200: 9e-3}},
    }
    found = Measurements({}, seconds)
    assert found.estimate(SPEC, "sdpa") == pytest.approx(1e-3)
    assert found.estimate(replace(SPEC, batch=6), "sdpa") == pytest.approx(9e-3 * 48 / 32)
    # One sequence after the other costs as many calls, each with its own start.
    assert found.estimate(replace(SPEC, batch=2, layout="varlen"), "sdpa") == pytest.approx(2e-3)


def test_a_call_of_no_sequence_takes_no_time_anywhere() -> None:
    found = measurements(naive={200: 3e-3}, sdpa={200: 2e-3})
    selection = select_backend(replace(SPEC, batch=0), "measured", usable=NAMES, hardware=HARDWARE, measurements=found)
    assert selection.choice == "sdpa"
    assert selection.others["naive"] == "It takes no time either."


@pytest.mark.parametrize(
    "change", [{"q_len": 0}, {"kv_len": 0}, {"q_len": 0, "kv_len": 0}, {"pattern": LocalWindow(3)}]
)
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_calls_are_chosen_for(change: dict[str, Any], batch: int) -> None:
    spec = replace(SPEC, **{"kv_len": 0, "batch": batch, **change})
    found = measurements(naive={200: 3e-3}, sdpa={200: 2e-3})
    for policy in ("threshold", "measured"):
        assert select_backend(spec, policy, usable=NAMES, hardware=HARDWARE, measurements=found).choice in NAMES


def test_series_that_no_call_is_like_are_refused() -> None:
    for arguments, words in (
        (("cosal", "float32", 8), "kind is 'cosal'; choose one of causal, full"),
        (("causal", "float16", 8), "dtype is 'float16'; choose one of float32, bfloat16"),
        (("causal", "float32", 0), "width is 0"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            Series(*arguments)
