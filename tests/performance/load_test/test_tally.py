"""What is added up, against sums by hand."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.tally import LoadTally, Slo


def answered(due: float, ttft: float, tokens: int, tpot: float, **fields: object) -> RequestRecord:
    """A streamed answer of one token an event; with a last event 1 ms after its last token."""
    first = due + ttft
    last = first + (tokens - 1) * tpot
    record = RequestRecord(
        0, 10, tokens, outcome="answered", due=due, sent=due, first=first, last=last, end=last + 0.001,
        prompt_tokens=12, output_tokens=tokens, tokens_from="usage", events=tokens,
    )  # fmt: skip
    record.gaps.extend([tpot] * (tokens - 1))
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def failed(due: float, end: float, error: str, **fields: object) -> RequestRecord:
    return RequestRecord(0, 10, 5, outcome="failed", error=error, due=due, sent=due, end=end, **fields)


def test_latencies_count_from_the_due_time_and_of_answers_alone() -> None:
    tally = LoadTally()
    tally.add(answered(1.0, 0.2, 5, 0.1, sent=1.15))
    tally.add(answered(2.0, 0.4, 1, 0.0))
    tally.add(failed(0.5, 90.0, "timeout"))
    assert [tally.latencies[name].count for name in ("ttft", "itl", "tpot", "e2e")] == [2, 4, 1, 2]
    assert tally.latencies["ttft"].total == pytest.approx(0.6)
    assert tally.latencies["tpot"].mean == pytest.approx(0.1)
    assert tally.latencies["e2e"].high == pytest.approx(0.601)
    assert tally.send_lag.high == pytest.approx(0.15)
    assert tally.seconds == pytest.approx(89.5)
    assert tally.mean_in_flight == pytest.approx((0.451 + 0.401 + 89.5) / 89.5)


def test_tokens_and_lengths() -> None:
    tally = LoadTally()
    tally.add(answered(0.0, 0.1, 5, 0.1))
    tally.add(answered(0.0, 0.1, 4, 0.1, planned_output_len=6, events=2))
    tally.add(answered(0.0, 0.1, 3, 0.1, prompt_tokens=None, tokens_from="events"))
    assert (tally.output_tokens, tally.prompt_tokens) == (12, 12 + 12 + 10)
    assert (tally.planned_output, tally.planned_prompt, tally.off_length) == (14, 30, 1)
    assert tally.tokens_from == {"usage": 2, "events": 1}
    assert tally.tokens_per_event == pytest.approx(12 / 10)
    assert tally.rate(tally.output_tokens) == pytest.approx(12 / (0.1 + 0.4 + 0.001))


def test_a_multi_token_first_event_is_left_out_of_tpot() -> None:
    record = answered(0.0, 1.0, 5, 0.5, first_tokens=3)
    assert record.tpot == pytest.approx(2.0 / 2)
    assert answered(0.0, 1.0, 3, 0.5, first_tokens=3).tpot is None


def test_goodput_counts_answers_within_all_limits_and_failures_as_not() -> None:
    tally = LoadTally(Slo(ttft=0.3, tpot=0.15))
    tally.add(answered(0.0, 0.3, 5, 0.15))
    tally.add(answered(0.0, 0.31, 5, 0.1))
    tally.add(answered(0.0, 0.1, 5, 0.16))
    tally.add(answered(0.0, 0.1, 1, 0.0))  # a single token has no TPOT
    tally.add(failed(0.0, 0.1, "timeout"))
    tally.add(RequestRecord(0, 1, 1, outcome="aborted", end=0.1))
    tally.add(RequestRecord(0, 1, 1, outcome="refused", error="http 400 x", malformed=True, end=0.1))
    tally.add(failed(0.0, 0.1, "http 500", malformed=True))
    assert (tally.good, tally.judged) == (2, 5)
    assert tally.to_json()["goodput"] == pytest.approx(2 / tally.seconds)
    assert not Slo(e2e=1e-3).met_by(answered(0.0, 0.1, 1, 0.0))


def test_outcomes_and_classes_are_counted_in_bounded_memory() -> None:
    tally = LoadTally()
    for number in range(1000):
        tally.add(failed(0.0, 1.0, f"error {number % 200}"))
    tally.add(RequestRecord(0, 1, 1, outcome="refused", error="http 400 x", end=1.0))
    assert tally.outcomes == {"answered": 0, "aborted": 0, "refused": 1, "failed": 1000}
    assert len(tally.errors) <= 51
    assert tally.errors.total() == 1000
    assert tally.errors["error 7"] == 5
    assert tally.refusals == {"http 400 x": 1}


def test_nothing_is_no_division_by_zero() -> None:
    plain = LoadTally().to_json()
    assert (plain["seconds"], plain["mean_in_flight"], plain["goodput"]) == (0.0, 0.0, None)


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan")])
def test_an_objective_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(InvalidArgumentError, match="is no objective"):
        Slo(tpot=limit)
