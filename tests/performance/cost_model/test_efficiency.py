"""Shares and seconds by hand, and what is refused."""

import json
import math
from dataclasses import replace

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.attention_work import Work
from vllm_teach.performance.cost_model.efficiency import Attained, Efficiency, assumed_efficiency
from vllm_teach.performance.cost_model.operators import OPERATORS
from vllm_teach.performance.hardware import get_hardware
from vllm_teach.performance.roofline import attainable

A100 = get_hardware("a100-80gb-sxm")


@pytest.mark.parametrize(("flops", "num_bytes"), [(1e12, 1e6), (1e6, 1e9), (1e10, 0.0), (0.0, 1e9)])
def test_full_overlap_is_the_roofline(flops: float, num_bytes: float) -> None:
    seconds = Attained(0.5, 0.25).seconds(Work(flops, num_bytes, 1), peak=2e12, bandwidth=4e9)
    if flops and num_bytes:
        assert flops / seconds == pytest.approx(attainable(flops / num_bytes, 1e12, 1e9))
    else:
        assert seconds == pytest.approx(flops / 1e12 + num_bytes / 1e9)


def test_without_overlap_they_add_up() -> None:
    work = Work(3e12, 1e9, 1)  # 3 s and 1 s
    each = [Attained(1.0, 1.0, overlap).seconds(work, 1e12, 1e9) for overlap in (1.0, 0.75, 0.0)]
    assert each == pytest.approx([3.0, 3.25, 4.0])


def test_an_infinite_share_costs_nothing() -> None:
    assert Attained(math.inf, math.inf).seconds(Work(1e12, 1e12, 1), 1.0, 1.0) == 0.0


@pytest.mark.parametrize("hardware", ["a100-80gb-sxm", "l4"])
def test_assumptions_are_complete_and_say_that_they_are_assumed(hardware: str) -> None:
    spec = get_hardware(hardware)
    found = assumed_efficiency(spec)
    assert set(found.attained) == set(OPERATORS)
    assert "assumed" in found.source
    assert all(0 < each.compute <= 1 and 0 < each.bandwidth <= 1 for each in found.attained.values())
    assert assumed_efficiency(spec, eager=True).call == spec.kernel_launch > found.call


def test_no_assumption_is_far_from_what_kernels_attain() -> None:
    """The band in which published kernels lie, so that a slip of a digit shows."""
    for kind, each in assumed_efficiency(A100).attained.items():
        assert 0.5 <= each.compute <= 1, kind
        assert 0.5 <= each.bandwidth <= 0.95, kind


def test_json_brings_back_the_same_without_infinity() -> None:
    found = assumed_efficiency(A100)
    found = replace(found, attained={**found.attained, "norms": Attained(math.inf, 0.5)})
    text = json.dumps(found.to_json(), allow_nan=False)
    assert Efficiency.from_json(json.loads(text)) == found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"compute": 0.0}, r"compute=0\.0"),
        ({"bandwidth": math.nan}, "bandwidth=nan"),
        ({"overlap": 1.5}, r"overlap=1\.5"),
    ],
)
def test_shares_that_cannot_be(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Attained(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attained": {}}, "attained has nothing: give each of embedding, norms"),
        ({"call": -1.0}, r"call=-1\.0"),
        ({"step": math.inf}, "step=inf"),
        ({"link": 0.0}, r"link=0\.0"),
    ],
)
def test_an_efficiency_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(assumed_efficiency(A100), **wrong)  # type: ignore[arg-type]
