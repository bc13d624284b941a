"""Experiments that need a clock, with what the clock would say made up: another measurement, another verdict."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_teach.performance.side_by_side import Race
from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.check import DIRECTION, FAILS, HOLDS
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
    ("ratio", "expected"), [(3.0, HOLDS), (5.9, HOLDS), (8.0, DIRECTION), (1.3, DIRECTION), (0.8, FAILS)]
)
def test_the_speed_of_flash_attention_here_beside_that_of_an_a100(ratio: float, expected: str) -> None:
    row = run("B-flash-attention", "time_ms", lab_with(layer(ratio, 6.0)))
    assert [each.outcome for each in row.verdict.judgements] == [expected, HOLDS]
    assert row.verdict.verdict == (CONFIRMED if expected == HOLDS else PARTLY)


def test_the_speed_at_4096_asks_for_the_ratio_and_for_its_growth() -> None:
    assert verdict("B-flash-attention", "speedup@4096", lab_with(layer(3.0, 6.0))) == CONFIRMED
    assert verdict("B-flash-attention", "speedup@4096", lab_with(layer(6.0, 6.0))) == PARTLY
    assert verdict("B-flash-attention", "speedup@4096", lab_with(layer(0.9, 0.8))) == CONTRADICTED


def test_the_fraction_is_the_inverse_of_the_causal_ratio() -> None:
    row = run("A-attention-2048", "attention_time_fraction_of_baseline", lab_with(layer(1 / 0.23, 6.0)))
    assert row.findings[0].value == pytest.approx(0.23)
    assert row.verdict.verdict == CONFIRMED


def test_on_an_a100_the_absolute_times_count_too() -> None:
    """Batch and layers are not published, so a time can only be of fewer or more layers than any model has."""

    def faster(times: float) -> tuple[Callable[[Lab], object], LayerRace]:
        name, found = layer(185 / 62, 6.0)  # of one layer 62 and 185 ms
        for race in found.races.values():
            race.seconds.update({key: Timing.of([taken.median / times] * 5) for key, taken in race.seconds.items()})
        return name, found

    row = run("B-flash-attention", "time_ms", lab_with(faster(32), a100=True))
    assert row.verdict.verdict == CONFIRMED
    assert len(row.verdict.judgements) == 4
    assert {finding.name: round(finding.value) for finding in row.findings if "this A100" in finding.name} == {
        "layers of the baseline on this A100": 32,
        "layers of the optimised on this A100": 32,
    }
    for times in (1, 500):
        assert verdict("B-flash-attention", "time_ms", lab_with(faster(times), a100=True)) == PARTLY
    assert len(run("B-flash-attention", "time_ms", lab_with(faster(32))).verdict.judgements) == 2


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
    slow = run("B-xformers", "local_window_512", lab_with(modes(0.9, 1.0), reading(window=0.01)))
    assert [each.outcome for each in slow.verdict.judgements] == [FAILS, HOLDS, FAILS, FAILS]  # the second is modelled


def test_exact_attention_refutes_half_a_per_cent() -> None:
    claimed = lab_with(modes(1.9, 1.8), reading(0.3, exact=0.005))
    assert verdict("B-xformers", "memory_efficient", claimed) == CONFIRMED
    assert verdict("B-xformers", "memory_efficient", lab_with(modes(1.9, 1.8), reading(0.3))) == PARTLY


def test_only_full_attention_copies() -> None:
    assert verdict("B-xformers", "code_completion", lab_with(reading(0.3))) == CONFIRMED
    for pattern in reading_patterns(1088):
        name, copying = reading(0.3)
        copying.again[pattern] = 0.4  # whichever it is: none is left out
        expected = CONFIRMED if pattern == "full" else PARTLY
        assert verdict("B-xformers", "code_completion", lab_with((name, copying))) == expected


def test_a_window_must_make_it_faster_and_write_as_well() -> None:
    for window, faster, expected in ((0.01, 3.5, PARTLY), (0.3, 3.5, CONTRADICTED)):
        lab = lab_with(modes(faster, 3.6), reading(window))  # all modes are as fast: the window gains nothing
        assert verdict("B-xformers", "text_generation", lab) == expected
    name, made = modes(1.5, 3.6)
    race = fake_race({"original": 3.0, "memory_efficient": 2.0, "local_window_512": 1.0}, "original")
    faster_window = (name, ModeRace(race, made.peaks, "made up"))
    assert verdict("B-xformers", "text_generation", lab_with(faster_window, reading(0.01))) == CONFIRMED


def test_the_passage_is_hidden_from_its_repetition_by_every_pattern_but_full() -> None:
    for length in (960, 1792):
        for name, pattern in reading_patterns(length + 128).items():
            seen = pattern.mask(length + 128, length + 128)[length:, 300:428]
            lower = name in ("window", "window and sinks", "neighbour and first block")
            assert bool(seen.any()) != lower or name == "half of the blocks", (name, length)


def systems(seconds: dict[str, float], peak_slots: int = 512) -> tuple[Callable[[Lab], object], ThreeSystems]:
    jobs = (Job((1, 2), 3),) * 8
    runs = {
        name: SystemRun(Timing.of([taken] * 5), Timing.of([taken / 10] * 5), Timing.of([taken] * 5), peak_slots, 20)
        for name, taken in seconds.items()
    }
    return run_three_systems, ThreeSystems(runs, jobs, 8, 1.0, 10**6, 10**4, 10, "made up")


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


def test_the_open_loop_is_told_with_its_rate_its_streams_and_their_length() -> None:
    fake, found = systems(AS_CLAIMED)
    seven = {name: replace(run, p99=Timing.of([run.p99.median] * 7)) for name, run in found.runs.items()}
    told = [
        each.setting
        for each in run("B-customer-service", "full_vllm", lab_with((fake, replace(found, runs=seven)))).findings
    ]
    assert any("open loop, 1 requests/s" in each and "7 streams, of whose 8 it is the slowest" in each for each in told)


def test_three_equal_systems_contradict_the_table() -> None:
    lab = lab_with(systems(dict.fromkeys(AS_CLAIMED, 0.5), peak_slots=8 * 512))
    for key in ("original_pytorch", "flashattention", "full_vllm"):
        assert verdict("B-customer-service", key, lab) == CONTRADICTED


def test_the_latency_row_is_the_throughput_row_again() -> None:
    gaps = {"original, batch 4": 0.020, "full": 0.060}  # many share a step, and each waits longer for his token
    simulated = {name: SimpleNamespace(latencies={"itl": {"p50": gap}}) for name, gap in gaps.items()}
    lab = lab_with(systems(AS_CLAIMED), (simulate_70b, simulated))
    row = run("A-llama2-70b-serving", "latency_ms_per_token", lab)
    found = {finding.name: finding.value for finding in row.findings}
    assert found["1000 / throughput, baseline"] == pytest.approx(23.8, abs=0.05)
    assert found["distance from 1000 / throughput"] < 0.01
    assert found["least time of a token, 8 x A100"] == pytest.approx(2 * 68.98e9 / (8 * 2.039e12) * 1e3, rel=1e-3)
    outcomes = [each.outcome for each in row.verdict.judgements]
    assert outcomes == ["fails", "fails", "holds", "fails"]
    assert found["time between tokens, original / full, modelled"] == pytest.approx(1 / 3)


def test_the_throughput_row_asks_for_the_strongest_baseline_too() -> None:
    rates = {"original, batch 1": 55.0, "original, batch 4": 184.0, "original, batch 256": 700.0, "full": 1477.0}
    simulated = {name: SimpleNamespace(output_throughput=rate) for name, rate in rates.items()}
    simulated["full"].workload = SimpleNamespace(arrivals=[0] * 1000)
    row = run(
        "A-llama2-70b-serving", "throughput_tokens_per_s", lab_with(systems(AS_CLAIMED), (simulate_70b, simulated))
    )
    assert [each.outcome for each in row.verdict.judgements] == [HOLDS, DIRECTION, HOLDS, FAILS]


def test_the_memory_row_is_less_than_the_weights() -> None:
    row = run("A-llama2-70b-serving", "gpu_memory_gb", lab_with(systems(AS_CLAIMED, peak_slots=100)))
    assert [each.outcome for each in row.verdict.judgements] == ["fails", "fails", "holds"]
    assert row.verdict.verdict == PARTLY
