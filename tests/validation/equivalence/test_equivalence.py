"""Every combination of any three settings, on the small offline model: the same tokens as transformers, or a near tie.

The full-sized check on the real model is a command: `python -m vllm_teach.validation.equivalence`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_teach import data
from vllm_teach.engine import logits
from vllm_teach.models import load_model, load_tokenizer, resolve_model
from vllm_teach.validation.equivalence.check import Checker
from vllm_teach.validation.equivalence.command import main
from vllm_teach.validation.equivalence.configurations import ROOMY, Configuration, list_configurations
from vllm_teach.validation.equivalence.reference import Reference
from vllm_teach.validation.equivalence.report import format_outcome
from vllm_teach.validation.equivalence.serve import LEAST_PREEMPTIONS, serve
from vllm_teach.validation.equivalence.workload import draw_greedy, draw_sampled

MODEL = resolve_model("tiny")
SMALL = Configuration("fcfs", "continuous", 4, 128, "hash", "scattered", "recompute", 3)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The reference's answers are computed here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TEACH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    return load_tokenizer(MODEL).encode(data.path("texts/corran_sound.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def make_checker(text_ids: list[int]) -> Callable[..., Checker]:
    """Return a factory of checkers of 16 short greedy requests and two sampled ones."""

    def make(dtype: torch.dtype = torch.float32, demanding: bool = False, **options) -> Checker:
        model, tokenizer = load_model(MODEL, dtype), load_tokenizer(MODEL)
        greedy, sampled = draw_greedy(text_ids, 16, 70, 20), draw_sampled(text_ids, 2, 66, 20)
        return Checker(model, tokenizer, Reference(MODEL), greedy, sampled, demanding=demanding, **options)

    return make


@pytest.fixture(scope="module")
def checker(make_checker: Callable[..., Checker]) -> Checker:
    checker = make_checker()
    # Alone, sampled tokens are what transformers' logits give with the same random numbers.
    assert all(difference.excused for difference in checker.prepare())
    return checker


@pytest.mark.parametrize("part", range(4))
def test_tokens_do_not_depend_on_the_settings(checker: Checker, part: int) -> None:
    configurations = list_configurations(strength=3)[part::4]
    outcomes = [checker.check(configuration) for configuration in configurations]
    for outcome in outcomes:
        print(format_outcome(0, outcome))
        assert all(each.excused for each in outcome.differences)
    # What each was set up for has happened, in the small pools too.
    assert sum(outcome.preemptions["recompute"] for outcome in outcomes) >= 20
    assert sum(outcome.preemptions["swap"] for outcome in outcomes) >= 20
    assert sum(outcome.hit_tokens for outcome in outcomes) >= 100
    assert [outcome.faults for outcome in outcomes] == [[]] * len(outcomes)


def test_the_small_pool_preempts_at_least_20_times(text_ids: list[int]) -> None:
    """As the command demands of 64 requests; here 24 are enough."""
    checker = Checker(
        load_model(MODEL),
        load_tokenizer(MODEL),
        Reference(MODEL),
        draw_greedy(text_ids, 24, 70, 24),
        draw_sampled(text_ids, 4, 40, 24),
    )
    assert all(difference.excused for difference in checker.prepare())
    for memory in ("recompute", "swap"):
        outcome = checker.check(replace(SMALL, memory=memory))
        assert outcome.preemptions[memory] >= LEAST_PREEMPTIONS
        assert outcome.passed


def test_one_wrong_token_fails_its_configuration(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of one request is changed behind the engine's back."""
    import vllm_teach.validation.equivalence.check as check

    def serve_badly(*arguments):
        served = serve(*arguments)
        tokens = served.requests[3].sequences[0].output_token_ids
        tokens[-1] = (tokens[-1] + 1) % 2048
        return served

    monkeypatch.setattr(check, "serve", serve_badly)
    outcome = checker.check(ROOMY)
    assert [(each.request, each.excused) for each in outcome.differences] == [(3, False)]
    assert not outcome.passed


def test_a_configuration_that_did_not_do_what_it_is_for_fails(make_checker: Callable[..., Checker]) -> None:
    """Equal tokens prove nothing about preemption and prefix hits where there were none."""
    demanding = make_checker(demanding=True)
    demanding.prepare()
    outcome = demanding.check(Configuration("fcfs", "static", 64, 16, "hash", "contiguous", "swap", 1))
    assert outcome.differences == []
    assert outcome.faults == ["0 preemptions by swap, not at least 20", "no token came from the prefix cache"]
    assert not outcome.passed


def test_bfloat16_reports_agreement(make_checker: Callable[..., Checker]) -> None:
    checker = make_checker(torch.bfloat16, rival=Reference(MODEL, torch.bfloat16))
    assert checker.prepare() == []
    outcome = checker.check(ROOMY)
    assert outcome.agreement is not None
    assert outcome.rival is not None
    assert outcome.agreement.num_tokens == outcome.num_tokens
    # Rounding moves few choices, ours as few as transformers' own; and it does move the scores.
    assert 0.9 < outcome.agreement.share <= 1
    assert abs(outcome.agreement.share - outcome.rival.share) < 0.05
    assert 0 < outcome.agreement.mean_error < 2 * outcome.rival.mean_error


def test_the_references_answers_are_computed_once(text_ids: list[int], tmp_path: Path) -> None:
    requests = draw_greedy(text_ids, 2, 5, 3)
    first = Reference(MODEL).continuations(requests, tmp_path)
    assert [len(each.tokens) for each in first] == [len(each.gaps) for each in first] == [3, 1]
    told: list[int] = []
    again = Reference(MODEL)
    assert again.continuations(requests, tmp_path, told.append) == first
    assert told == []
    assert "model" not in vars(again)  # it was not even loaded
    again.continuations(draw_greedy(text_ids, 2, 5, 3, seed=1), tmp_path, told.append)
    assert told == [0, 1]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    arguments = ["--model", "tiny", "--quick", "--requests", "4", "--configurations", "1", "--json", str(file)]
    assert main(arguments) == 0
    assert "1 of 1 configurations passed" in capsys.readouterr().out
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["passed"]
    assert result["configurations"][0]["differences"] == []
    assert {"command", "model", "dtype", "environment", "seconds"} <= result.keys()


def test_command_fails_on_a_wrong_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's greedy choice is spoilt: the least likely token instead of the most likely one."""
    monkeypatch.setattr(logits, "most_likely", lambda scores: scores.argmin(-1))
    assert main(["--model", "tiny", "--quick", "--requests", "4", "--configurations", "1"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_command_refuses_no_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--configurations", "0"]) == 2
    assert "--configurations 0" in capsys.readouterr().err
