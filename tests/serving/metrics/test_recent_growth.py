"""What came of late, against adding up what lies in the window."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.serving.metrics.recent_growth import RecentGrowth


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=30))
def test_it_is_the_sum_of_what_lies_in_the_window(events: list[tuple[int, int]]) -> None:
    now = [50]
    growth = RecentGrowth(10, lambda: now[0])
    came: list[tuple[int, int]] = []
    for wait, amount in events:
        now[0] += wait
        growth.add(amount)
        came.append((now[0], amount))
        assert growth.growth() == sum(amount for moment, amount in came if moment > now[0] - 10)
        passed = min(10, now[0] - 50)
        assert growth.per_second() == (growth.growth() / passed if passed else 0)
    now[0] += 10
    assert growth.growth() == growth.per_second() == 0


def test_memory_is_that_of_the_window_alone() -> None:
    now = [0.0]
    growth = RecentGrowth(1.0, lambda: now[0])
    for _ in range(1000):
        now[0] += 0.1
        growth.add(1)
    assert len(growth._sums) < 15
