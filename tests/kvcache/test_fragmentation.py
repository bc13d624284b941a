import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.kvcache.fragmentation import consecutive_runs, external_fragmentation, internal_fragmentation


def test_runs_of_consecutive_blocks() -> None:
    assert consecutive_runs([7, 3, 2, 0, 8]) == [(0, 1), (2, 2), (7, 2)]
    assert consecutive_runs([]) == []


@given(st.sets(st.integers(0, 40)))
def test_external_fragmentation_against_a_bitmap(free: set[int]) -> None:
    text = "".join("." if block in free else "#" for block in range(41))
    longest = max(map(len, text.split("#")))
    expected = 1 - longest / len(free) if free else 0.0
    assert external_fragmentation(free) == pytest.approx(expected)


def test_external_fragmentation_is_0_when_all_lies_together() -> None:
    assert external_fragmentation(range(5, 9)) == 0.0
    assert external_fragmentation([0, 2, 4, 6]) == 0.75


def test_internal_fragmentation() -> None:
    assert internal_fragmentation(0, 0) == 0.0
    assert internal_fragmentation(12, 16) == 0.25
    assert internal_fragmentation(16, 16) == 0.0
