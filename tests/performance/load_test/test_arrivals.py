"""When requests are due: rates, patterns and bursts."""

import math
import statistics
from itertools import islice, pairwise

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.arrivals import ClosedLoop, OpenLoop


def due(arrivals: OpenLoop, count: int, seed: int = 0) -> list[float]:
    return [offset for offset in islice(arrivals.offsets(seed), count) if offset is not None]


def test_a_fixed_rate_is_exact_however_long_it_lasts() -> None:
    assert due(OpenLoop(10, "fixed"), 4) == [0, 0.1, 0.2, pytest.approx(0.3)]
    assert next(islice(OpenLoop(3, "fixed").offsets(0), 3_000_000, None)) == pytest.approx(1e6, rel=1e-15)


def test_poisson_gaps_are_exponential_with_the_mean_of_the_rate() -> None:
    times = due(OpenLoop(50), 20_000)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)  # an exponential's deviation is its mean
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("pattern", ["poisson", "fixed"])
def test_bursts_come_at_one_instant_and_keep_the_rate(pattern: str) -> None:
    times = due(OpenLoop(100, pattern, burst=5), 10_000)
    assert all(len(set(times[i : i + 5])) == 1 for i in range(0, 10_000, 5))
    assert len(set(times)) == 2000
    assert times[-1] == pytest.approx(100, rel=0.06)


def test_the_seed_decides() -> None:
    assert due(OpenLoop(5), 10, seed=1) == due(OpenLoop(5), 10, seed=1) != due(OpenLoop(5), 10, seed=2)


def test_a_closed_loop_has_no_times() -> None:
    assert list(islice(ClosedLoop(3).offsets(0), 3)) == [None, None, None]
    assert ClosedLoop(3).max_in_flight == 3


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgumentError, match="is no rate"):
        OpenLoop(rate)


def test_other_nonsense_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="concurrency=0"):
        ClosedLoop(0)
    with pytest.raises(InvalidArgumentError, match="pattern='uniform'"):
        OpenLoop(1, "uniform")
    with pytest.raises(InvalidArgumentError, match="burst=0"):
        OpenLoop(1, burst=0)
    with pytest.raises(InvalidArgumentError, match="max_in_flight=0"):
        OpenLoop(1, max_in_flight=0)
