"""Experiments that need a clock, with what the clock would say made up: another measurement, another verdict."""

from collections.abc import Callable

import pytest

from vllm_teach.performance.side_by_side import Race
from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.experiment import load_experiments
from vllm_teach.validation.audit.experiments.attention_modes import ModeRace, race_modes
from vllm_teach.validation.audit.experiments.attention_speed import LayerRace, race_layer
from vllm_teach.validation.audit.experiments.large_model_serving import simulate_70b
from vllm_teach.validation.audit.experiments.pattern_reading import Reading, read_patterns, reading_patterns
from vllm_teach.validation.audit.experiments.three_systems import Job, SystemRun, ThreeSystems, run_three_systems
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.run import RowAudit, audit_row
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, PARTLY


def lab_with(*measured: tuple[Callable[[Lab], object], object], a100: bool = False) -> Lab:
    lab = Lab(quick=True)
    lab._done = dict(measured)
    if a100:
        lab.__dict__["is_a100"] = True
    return lab


def verdict(table_id: str, key: str, lab: Lab) -> str:
    return run(table_id, key, lab).verdict.verdict


def run(table_id: str, key: str, lab: Lab) -> RowAudit:
    row = audit_row(load_experiments().get(table_id, key), lab)
    assert row.stopped is None
    return row


def fake_race(seconds: dict[str, float], baseline: str) -> Race:
    timings = {name: Timing.of([taken] * 5) for name, taken in seconds.items()}
    return Race(
        baseline, timings, {name: Timing.of([taken / seconds[baseline]] * 5) for name, taken in seconds.items()}
    )


def layer(ratio: float, at_4096: float, peak_ratio: float = 2.9) -> tuple[Callable[[Lab], object], LayerRace]:
    races = {
        (length, causal): fake_race({"tiled": 0.062, "naive": 0.062 * times}, "tiled")
        for length, causal, times in ((2048, False, ratio), (2048, True, ratio), (4096, False, at_4096))
    }
    peaks = {(2048, False): {"naive": int(1000 * peak_ratio), "tiled": 1000}}
    return race_layer, LayerRace(races, peaks, "made up")


@pytest.mark.parametrize(
    ("ratio", "expected"), [(3.0, CONFIRMED), (5.9, CONFIRMED), (8.0, PARTLY), (1.3, PARTLY), (0.8, CONTRADICTED)]
)
def test_the_speed_of_flash_attention(ratio: float, expected: str) -> None:
    assert verdict("B-flash-attention", "time_ms", lab_with(layer(ratio, 6.0))) == expected


def test_the_speed_at_4096_asks_for_the_ratio_and_for_its_growth() -> None:
    assert verdict("B-flash-attention", "speedup@4096", lab_with(layer(3.0, 6.0))) == CONFIRMED
    assert verdict("B-flash-attention", "speedup@4096", lab_with(layer(6.0, 6.0))) == PARTLY
    assert verdict("B-flash-attention", "speedup@4096", lab_with(layer(0.9, 0.8))) == CONTRADICTED


def test_the_fraction_is_the_inverse_of_the_causal_ratio() -> None:
    row = run("A-attention-2048", "attention_time_fraction_of_baseline", lab_with(layer(1 / 0.23, 6.0)))
    assert row.findings[0].value == pytest.approx(0.23)
    assert row.verdict.verdict == CONFIRMED


def test_on_an_a100_the_absolute_times_count_too() -> None:
    """62 ms for the tiled layer, and three times that, 186 ms, for the naive one: as published."""
    row = run("B-flash-attention", "time_ms", lab_with(layer(3.0, 6.0), a100=True))
    assert row.verdict.verdict == CONFIRMED
    assert len(row.verdict.judgements) == 3
    assert {finding.name: round(finding.value) for finding in row.findings if "this A100" in finding.name} == {
        "baseline on this A100": 186,
        "optimised on this A100": 62,
    }
    slow = layer(3.0, 6.0)
    for race in slow[1].races.values():
        race.seconds.update({name: Timing.of([taken.median / 50] * 5) for name, taken in race.seconds.items()})
    assert verdict("B-flash-attention", "time_ms", lab_with(slow, a100=True)) == PARTLY


def reading(window: float, exact: float = 1e-8) -> tuple[Callable[[Lab], object], Reading]:
    running = dict.fromkeys(reading_patterns(1088), 3.0) | {"window": 3.0 + window}
    return read_patterns, Reading(running, dict.fromkeys(running, 4.0) | {"full": 0.3}, 4.0, exact, "made up")


def modes(faster: float, less: float) -> tuple[Callable[[Lab], object], ModeRace]:
    seconds = {"original": 0.185} | dict.fromkeys(
        ("memory_efficient", "sparse_50_percent", "local_window_512"), 0.185 / faster
    )
    peaks = {name: int(1e6 if name == "original" else 1e6 / less) for name in seconds}
    return race_modes, ModeRace(fake_race(seconds, "original"), peaks, "made up")


def test_a_window_that_is_as_fast_and_as_small_as_claimed_and_spoils_the_text_is_confirmed() -> None:
    lab = lab_with(modes(3.5, 3.6), reading(window=0.3))
    assert verdict("B-xformers", "local_window_512", lab) == CONFIRMED
    assert verdict("B-xformers", "local_window_512", lab_with(modes(3.5, 3.6), reading(window=0.01))) == PARTLY
    assert verdict("B-xformers", "local_window_512", lab_with(modes(0.9, 1.0), reading(window=0.01))) == CONTRADICTED


def test_exact_attention_refutes_half_a_per_cent() -> None:
    claimed = lab_with(modes(1.9, 1.8), reading(0.3, exact=0.005))
    assert verdict("B-xformers", "memory_efficient", claimed) == CONFIRMED
    assert verdict("B-xformers", "memory_efficient", lab_with(modes(1.9, 1.8), reading(0.3))) == PARTLY


def test_only_full_attention_copies() -> None:
    assert verdict("B-xformers", "code_completion", lab_with(reading(0.3))) == CONFIRMED
    name, copying = reading(0.3)
    copying.again["window"] = 0.4
    assert verdict("B-xformers", "code_completion", lab_with((name, copying))) == PARTLY


def test_the_passage_is_hidden_from_its_repetition_by_every_pattern_but_full() -> None:
    for length in (960, 1792):
        for name, pattern in reading_patterns(length + 128).items():
            seen = pattern.mask(length + 128, length + 128)[length:, 300:428]
            lower = name in ("window", "window and sinks", "neighbour and first block")
            assert bool(seen.any()) != lower or name == "half of the blocks", (name, length)


def systems(seconds: dict[str, float], peak_slots: int = 512) -> tuple[Callable[[Lab], object], ThreeSystems]:
    jobs = (Job((1, 2), 3),) * 8
    runs = {
        name: SystemRun(Timing.of([taken] * 5), Timing.of([taken / 10] * 5), (taken,) * 8, peak_slots)
        for name, taken in seconds.items()
    }
    return run_three_systems, ThreeSystems(runs, jobs, 1.0, 10**6, 10**4, 10, "made up")


AS_CLAIMED = {"original": 0.85, "flash": 0.32, "full": 0.15}


def test_the_three_systems_as_claimed_are_confirmed_but_for_what_attention_saves_of_the_memory() -> None:
    lab = lab_with(systems(AS_CLAIMED, peak_slots=1400))
    assert verdict("B-customer-service", "full_vllm", lab) == CONFIRMED
    assert verdict("B-customer-service", "flashattention", lab) == PARTLY  # contiguous memory stays reserved
    found = {finding.name: finding.value for finding in run("B-customer-service", "full_vllm", lab).findings}
    weights, reserved = 10**6, 8 * 512 * 10**4
    assert found["memory for all requests at once, gain over the original"] == pytest.approx(
        (weights + reserved + 10) / (weights + 1400 * 10**4)
    )
    assert found["requests in flight by Little's law"] == pytest.approx(68 * 0.15)


def test_three_equal_systems_contradict_the_table() -> None:
    lab = lab_with(systems(dict.fromkeys(AS_CLAIMED, 0.5), peak_slots=8 * 512))
    for key in ("original_pytorch", "flashattention", "full_vllm"):
        assert verdict("B-customer-service", key, lab) == CONTRADICTED


def test_the_latency_row_is_the_throughput_row_again() -> None:
    lab = lab_with(systems(AS_CLAIMED), (simulate_70b, {}))
    row = run("A-llama2-70b-serving", "latency_ms_per_token", lab)
    found = {finding.name: finding.value for finding in row.findings}
    assert found["1000 / throughput, baseline"] == pytest.approx(23.8, abs=0.05)
    assert found["distance from 1000 / throughput"] < 0.01
    assert found["least time of a token, 8 x A100"] == pytest.approx(2 * 68.98e9 / (8 * 2.039e12) * 1e3, rel=1e-3)
    outcomes = [each.outcome for each in row.verdict.judgements]
    assert outcomes == ["fails", "holds", "fails"]


def test_the_memory_row_is_less_than_the_weights() -> None:
    row = run("A-llama2-70b-serving", "gpu_memory_gb", lab_with(systems(AS_CLAIMED, peak_slots=100)))
    assert [each.outcome for each in row.verdict.judgements] == ["fails", "fails", "holds"]
    assert row.verdict.verdict == PARTLY
