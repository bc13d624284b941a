"""Percentiles of any number of measurements in bounded memory, each within 0.1 % of the exact one.

The borders of the buckets grow by a constant factor, so that a bucket is as narrow as its values are small (Masson,
Rim, Lee, "DDSketch", VLDB 2019, section 2.1). A million gaps between tokens take as much memory as a thousand.
"""

from __future__ import annotations

import math

from vllm_teach.errors import InvalidArgumentError

ACCURACY = 1e-3
PERCENTILES = (50, 90, 95, 99)

_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GROWTH = math.log(_GROWTH)
_MIDDLE = 2 / (_GROWTH + 1)  # of a bucket, as a share of its upper border: equally far from both, relatively
_SMALLEST = 1e-7  # seconds: what is below a tick of the clock counts as 0
_LARGEST = 1e9  # 13,500 buckets at most between the two


class LogHistogram:
    """Counts values from 0 by their size. `count`, `total`, `low` and `high` are exact."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.low, self.high = math.inf, -math.inf
        self._buckets: dict[int, int] = {}
        self._zeros = 0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times over. Raises InvalidArgumentError for one below 0, or not finite."""
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgumentError(f"value={value!r} cannot be counted: give a finite number from 0.")
        self.count += times
        self.total += value * times
        self.low, self.high = min(self.low, value), max(self.high, value)
        if value < _SMALLEST:
            self._zeros += times
            return
        index = math.ceil(math.log(min(value, _LARGEST)) / _LOG_GROWTH)
        self._buckets[index] = self._buckets.get(index, 0) + times

    @property
    def mean(self) -> float:
        """The mean, exact but for rounding. Raises InvalidArgumentError when nothing was counted."""
        if not self.count:
            raise InvalidArgumentError("count is 0: a histogram of nothing has no mean.")
        return self.total / self.count

    def quantile(self, share: float) -> float:
        """Return the least value that `share` (0 to 1) of all do not exceed (nearest rank), within `ACCURACY` of it.

        Raises InvalidArgumentError for a share that is none, and when nothing was counted.
        """
        if not self.count or not 0 <= share <= 1:
            raise InvalidArgumentError(f"share={share!r} of {self.count} values is nothing: use 0 to 1, some values.")
        # Rounded first: 0.07 · 100 is a little above 7, and would become rank 8.
        rank = max(1, math.ceil(round(share * self.count, 6)))
        if rank == self.count:
            return self.high
        passed = self._zeros
        if passed >= rank:
            return self.low if self.low > 0 else 0.0
        for index in sorted(self._buckets):
            passed += self._buckets[index]
            if passed >= rank:
                return min(max(_GROWTH**index * _MIDDLE, self.low), self.high)
        return self.high

    def summary(self) -> dict[str, float] | None:
        """Return count, mean, the `PERCENTILES` and the largest value as plain data; None when nothing was counted."""
        if not self.count:
            return None
        percentiles = {f"p{percent}": self.quantile(percent / 100) for percent in PERCENTILES}
        return {"count": self.count, "mean": self.mean, **percentiles, "max": self.high}
