"""Values counted by bounds, against counting them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.engine.bucket_counts import BucketCounts
from vllm_teach.errors import InvalidArgumentError

BOUNDS = (0.5, 1.0, 4.0)
VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 3.0, 4.0, 9.0]))


@given(VALUES)
def test_each_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed(values: list[float]) -> None:
    counts = BucketCounts(BOUNDS)
    counts.add_all(values)
    cumulative = [sum(value <= bound for value in values) for bound in BOUNDS] + [len(values)]
    found, total = counts.read()
    assert [sum(found[: end + 1]) for end in range(4)] == cumulative
    assert total == sum(values)


@given(VALUES, VALUES, VALUES)
def test_a_difference_is_what_came_in_between(first: list[float], second: list[float], own: list[float]) -> None:
    source, copy, wanted = BucketCounts(BOUNDS), BucketCounts(BOUNDS), BucketCounts(BOUNDS)
    source.add_all(first)
    before = source.read()
    source.add_all(second)
    copy.add_all(own)
    copy.add_difference(source.read(), before)
    wanted.add_all(own + second)
    assert copy.read() == wanted.read()
    copy.add_difference(before)
    wanted.add_all(first)
    assert copy.read() == wanted.read()


def test_what_was_read_stays() -> None:
    counts = BucketCounts(BOUNDS)
    before = counts.read()
    counts.add(1)
    assert before == ((0, 0, 0, 0), 0)


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"bounds=.* is not valid"):
        BucketCounts(bounds)
