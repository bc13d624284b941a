"""What a load test sends: lengths, faults, and that each comes from its own source."""

from dataclasses import replace
from itertools import islice

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import ALPACA, SHAREGPT
from vllm_teach.performance.load_test.arrivals import OpenLoop
from vllm_teach.performance.load_test.plan import LoadPlan


def test_lengths_are_those_of_the_mix_and_go_on_beyond_a_page() -> None:
    drawn = [
        (each.prompt_len, each.output_len) for each in LoadPlan(num_requests=9000, lengths=SHAREGPT, seed=3).requests()
    ]
    assert drawn[:1000] == SHAREGPT.draw(1000, 3)
    assert len(drawn) == 9000
    assert drawn[4096:8192] != drawn[:4096]


def test_shares_are_kept_and_leave_lengths_and_times_alone() -> None:
    plain = LoadPlan(OpenLoop(10), 5000, ALPACA)
    faulty = list(replace(plain, abort_share=0.1, malformed_share=0.05).requests())
    assert [(r.offset, r.prompt_len, r.output_len) for r in faulty] == [
        (r.offset, r.prompt_len, r.output_len) for r in plain.requests()
    ]
    aborted = [r for r in faulty if r.abort is not None]
    assert len(aborted) == pytest.approx(500, abs=60)
    assert sum(r.malformed is not None for r in faulty) == pytest.approx(250, abs=45)
    assert not any(r.abort is not None and r.malformed is not None for r in faulty)
    by_events = [r for r in aborted if r.abort is not None and r.abort.events is not None]
    assert len(by_events) == pytest.approx(len(aborted) / 2, abs=40)
    assert all(1 <= (r.abort.events or 0) <= r.output_len for r in by_events if r.abort)
    assert all(0 <= r.abort.seconds < 1 for r in aborted if r.abort)


def test_a_larger_share_keeps_the_malformed_of_a_smaller_one() -> None:
    few, many = (
        {r.index: r.malformed for r in LoadPlan(num_requests=500, malformed_share=share).requests()}
        for share in (0.1, 0.3)
    )
    assert all(many[index] == kind for index, kind in few.items() if kind is not None)


def test_requests_are_drawn_only_as_they_are_needed() -> None:
    first = list(islice(LoadPlan(num_requests=10**9, lengths=SHAREGPT).requests(), 3))
    assert [each.index for each in first] == [0, 1, 2]


def test_warm_up_requests_are_others_and_nothing_goes_wrong_in_them() -> None:
    plan = LoadPlan(num_requests=5, lengths=SHAREGPT, warm_up=3, abort_share=0.5, malformed_share=0.5)
    warm = list(plan.warm_up_requests())
    assert [each.index for each in warm] == [-1, -2, -3]
    assert all(each.offset is each.abort is each.malformed is None for each in warm)
    assert [e.prompt_len for e in warm] != [e.prompt_len for e in plan.requests()][:3]


def test_a_short_context_clips_a_mix_and_refuses_what_is_fixed() -> None:
    clipped = LoadPlan(num_requests=2000, lengths=SHAREGPT).within(256)
    assert max(each.prompt_len for each in clipped.requests()) == 128
    assert max(each.prompt_len + each.output_len for each in clipped.requests()) == 256
    assert LoadPlan(lengths=(100, 28)).within(128).lengths == (100, 28)
    with pytest.raises(InvalidArgumentError, match="100 and 29 tokens do not fit into 128"):
        LoadPlan(lengths=(100, 29)).within(128)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_requests": 0}, "num_requests=0"),
        ({"warm_up": -1}, "warm_up=-1"),
        ({"lengths": (0, 5)}, "prompt length=0"),
        ({"lengths": (5, 0)}, "output length=0"),
        ({"abort_share": 1.5}, "abort_share=1.5"),
        ({"malformed_share": float("nan")}, "malformed_share=nan"),
        ({"abort_share": 0.6, "malformed_share": 0.6}, "make more than 1"),
        ({"abort_within": 0}, "abort_within=0"),
        ({"duration": -1}, "duration=-1"),
    ],
)
def test_nonsense_is_refused(fields: dict, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        LoadPlan(**fields)
