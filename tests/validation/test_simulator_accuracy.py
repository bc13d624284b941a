"""What is compared with what: the engine on the clock, the simulator beside it with the engine's own settings."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from vllm_teach import LLM
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.openmp import WAIT_SHORTLY
from vllm_teach.performance.cost_model import Attained, Efficiency
from vllm_teach.performance.cost_model.fit import Fit, Residual
from vllm_teach.performance.cost_model.operators import OPERATORS
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.training_steps import SCRIPTS, TINY_SCRIPTS, Script, Wave
from vllm_teach.performance.hardware import get_hardware
from vllm_teach.performance.virtual_time import Arrival, StepCost
from vllm_teach.validation import simulator_accuracy
from vllm_teach.validation.simulator_accuracy import (
    LIMIT,
    WORKLOADS,
    Accuracy,
    Comparison,
    Served,
    measure_accuracy,
    serve,
    serve_modelled,
)

FIT = Fit(
    machine={},
    hardware=get_hardware("l4"),
    dtype="float32",
    efficiency=Efficiency(dict.fromkeys(OPERATORS, Attained()), 0.0, 1e-3, 0.0, 1.0, "a test"),
    residuals=(Residual("tiny", "one", StepShape(1, 1, 1, 1, 10), 1.0, 0.9, 1.1, 1.02),),
    provenance={},
)
FEW = (*TINY_SCRIPTS, *(Script(f"{n} more", (Wave(0, n, 20),), 2) for n in (2, 4, 8)))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", num_kv_blocks=64, max_num_seqs=2, max_num_batched_tokens=16)


def test_the_engine_serves_each_request_when_it_is_due(llm):
    arrivals = [Arrival(20, 5), Arrival(3, 2), Arrival(8, 4, 0.2)]
    before = llm.engine.totals.generation_tokens
    found = serve(llm, arrivals, random.Random(0))
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.totals.generation_tokens - before == 11
    assert 0 < found.throughput <= 11 / 0.2  # the last one came after 0.2 s
    assert 0 < found.mean_ttft < 11 / found.throughput


def test_the_simulator_has_the_engines_limits(llm):
    """By hand: 16 tokens a step and 2 sequences at once, 10 ms a step."""
    arrivals = [Arrival(20, 2), Arrival(4, 2), Arrival(4, 1)]
    found = serve_modelled(llm, arrivals, StepCost(step=0.01, token=0.0))
    # Step 1: 16 of the first prompt. 2: its last 4, and the second. 3: both decode and end. 4: the third.
    assert found.mean_ttft == pytest.approx((0.02 + 0.02 + 0.04) / 3)
    assert found.throughput == pytest.approx(5 / 0.04)


def test_times_count_from_the_first_arrival(llm):
    late = serve_modelled(llm, [Arrival(4, 2, 7.0)], StepCost(step=0.01, token=0.0))
    assert (late.throughput, late.mean_ttft) == pytest.approx((100, 0.01))


def accuracy(*modelled: float) -> Accuracy:
    rounds = (Served(90.0, 1.0), Served(100.0, 2.0), Served(400.0, 2.5))
    return Accuracy(
        FIT, tuple(Comparison(f"load {i}", rounds, Served(each * 100, each * 2)) for i, each in enumerate(modelled))
    )


def test_an_error_is_that_of_the_median_round():
    comparison = accuracy(1.1).comparisons[0]
    assert comparison.median("throughput") == 100
    assert comparison.error("throughput") == pytest.approx(0.1)
    assert comparison.error("mean_ttft") == pytest.approx(0.1)


def test_the_median_error_has_no_sign_and_decides():
    assert accuracy(0.7, 1.1, 0.9).median_error("throughput") == pytest.approx(0.1)
    assert accuracy(0.7, 1.1, 0.9).passed()
    assert not accuracy(0.7, 1.3, 1.0).passed()
    one_sided = accuracy(1.0)
    only = replace(one_sided.comparisons[0], modelled=Served(100.0, 2 * (1 + 2 * LIMIT)))
    assert not replace(one_sided, comparisons=(only,)).passed()


def test_the_table_has_each_residual_and_the_spread():
    text = str(accuracy(0.7, 1.1))
    for part in ("load 0", "load 1", "-30.0%", "+10.0%", "(90 - 400)", "(1,000 - 2,500)", "the limit is 15%"):
        assert part in text
    assert json.loads(json.dumps(accuracy(0.7).to_json()))["median_error"]["throughput"] == pytest.approx(0.3)


def test_no_workload_is_one_that_the_model_is_fitted_to():
    assert len(WORKLOADS) >= 6
    fitted = {tuple(sorted((wave.num_prompts, wave.length) for wave in script.waves)) for script in SCRIPTS}
    for arrivals in WORKLOADS.values():
        lengths = [each.prompt_len for each in arrivals]
        assert tuple(sorted((lengths.count(length), length) for length in set(lengths))) not in fitted


def test_it_measures_fits_and_compares(monkeypatch, tmp_path, capsys):
    """On the tiny model, with two small workloads: the chain, not its figures."""
    monkeypatch.setattr(
        simulator_accuracy, "WORKLOADS", {"a": [Arrival(9, 3)] * 3, "b": [Arrival(30, 2), Arrival(5, 4, 0.01)]}
    )
    found = measure_accuracy("tiny", rounds=1, scripts=FEW, progress=False)
    assert [each.workload for each in found.comparisons] == ["a", "b"]
    assert all(len(each.measured) == 1 for each in found.comparisons)
    assert len(found.fit.residuals) >= 14
    assert all(each.modelled.throughput > 0 for each in found.comparisons)


def test_no_round_is_refused_before_a_model_is_loaded():
    with pytest.raises(InvalidArgumentError, match="rounds=0 measures nothing"):
        measure_accuracy("no such model", 0)


def test_a_file_that_cannot_be_written_is_told_before_minutes_are_spent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulator_accuracy, "measure_accuracy", lambda *_: pytest.fail("measures"))
    for file in (tmp_path, tmp_path / "nowhere" / "a.json"):
        monkeypatch.setattr("sys.argv", ["simulator_accuracy", "--json", str(file)])
        with pytest.raises(SystemExit):
            simulator_accuracy.main()
        assert f"--json is {str(file)!r}, which cannot be written" in capsys.readouterr().err


def test_pytorch_is_not_there_before_the_threads_are_told_how_to_wait():
    script = "import sys, vllm_teach.validation.simulator_accuracy; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_typed_error_is_one_line(monkeypatch, capsys):
    for name in WAIT_SHORTLY:  # which main sets for good
        monkeypatch.setenv(name, "of this test")
    monkeypatch.setattr(sys, "argv", ["simulator_accuracy", "--rounds", "0"])
    assert simulator_accuracy.main() == 2
    assert "rounds=0 measures nothing" in capsys.readouterr().err
