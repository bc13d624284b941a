"""The model of an A100 beside runs of others: nothing in it was fitted to them."""

import statistics

from vllm_teach.validation.published_runs import OTHER_RUNS, PUBLISHED_RUNS


def test_the_model_is_near_an_engine_that_publishes_its_settings() -> None:
    ratios = [run.modelled() / run.tokens_per_s for run in PUBLISHED_RUNS if run.system == "lmdeploy"]
    assert len(ratios) == 16
    assert min(ratios) > 0.95
    assert max(ratios) < 1.4
    assert 1.1 < statistics.median(ratios) < 1.35


def test_every_run_can_be_repeated_from_what_it_says() -> None:
    for run in PUBLISHED_RUNS + OTHER_RUNS:
        assert min(run.devices, run.batch, run.input_len, run.output_len) >= 1
        assert run.source
    rates = {run.system: run.tokens_per_s for run in PUBLISHED_RUNS if run.batch == 24}
    assert rates["vLLM"] == 24 * 1024 / 76.12


def test_no_run_stands_in_two_places() -> None:
    settings = [(r.system, r.model, r.devices, r.batch, r.input_len, r.output_len) for r in PUBLISHED_RUNS + OTHER_RUNS]
    assert len(set(settings)) == len(settings)
    steady = [run for run in OTHER_RUNS if run.system == "lmdeploy"]
    assert [round(run.tokens_per_s / run.output_len, 3) for run in steady] == [14.556, 7.95, 7.231]
