"""How a foreign exception becomes a typed error, whatever it is like."""

import pytest

from vllm_teach import SamplingParams
from vllm_teach.engine.failure import engine_error, shown
from vllm_teach.errors import EngineError


class Unspeakable(Exception):
    """Cannot say what it is."""

    def __repr__(self) -> str:
        raise ValueError("no words")

    __str__ = __repr__


def test_the_cause_is_kept_without_the_frames_it_came_through() -> None:
    try:
        try:
            raise KeyError("deep")
        except KeyError as error:
            raise RuntimeError("shallow") from error
    except RuntimeError as error:
        failure = engine_error("it failed", error, "try again")
    assert str(failure) == "it failed (RuntimeError('shallow')): try again."
    assert isinstance(failure.__cause__, RuntimeError)
    assert failure.__cause__.__traceback__ is None
    assert failure.__cause__.__cause__ is not None
    assert failure.__cause__.__cause__.__traceback__ is None
    assert "deep" in failure.__notes__[0]


def test_an_engine_error_comes_back_as_it_is() -> None:
    error = EngineError("mine.")
    assert engine_error("it failed", error, "try again") is error


@pytest.mark.parametrize("cause", [Unspeakable(), KeyError("x" * 10**6), ValueError(10**5000)])
def test_no_cause_is_too_long_or_unspeakable(cause: Exception) -> None:
    failure = engine_error("it failed", cause, "try again")
    assert str(failure).startswith("it failed (")
    assert str(failure).endswith("): try again.")
    assert len(str(failure)) < 400


def test_what_is_shown_of_a_value_has_its_beginning_and_its_end() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert shown("a" * 50 + "b" * 50) == "'" + "a" * 50 + "b" * 9 + "..." + "b" * 16 + "'"
    assert shown(Unspeakable()) == "<Unspeakable>"


def test_a_tokenizer_whose_error_cannot_be_shown_fails_its_request_alone(llm, monkeypatch) -> None:
    decode = type(llm.tokenizer).decode

    def broken(self, ids, **options):
        if 99 in ids:
            raise Unspeakable
        return decode(self, ids, **options)

    neighbour = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
    expected = llm.generate([[4, 5, 6]], neighbour, use_tqdm=False)[0].outputs
    monkeypatch.setattr(type(llm.tokenizer), "decode", broken)
    caller = SamplingParams(max_tokens=5, logit_bias={99: 100}, temperature=0)
    outputs = llm.generate([[1, 2], [4, 5, 6]], [caller, neighbour], use_tqdm=False, on_error="return")
    assert "<Unspeakable>" in str(outputs[0].error)
    assert outputs[1].outputs == expected
