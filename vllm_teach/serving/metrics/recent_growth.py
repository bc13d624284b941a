"""How much of something came of late: what a rate is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class RecentGrowth:
    """Adds up amounts and looks back `window` seconds of `clock` at what came of them."""

    def __init__(self, window: float, clock: Callable[[], float]) -> None:
        self._window, self._clock = window, clock
        self._began = clock()
        self._sums: deque[tuple[float, float]] = deque([(self._began, 0.0)])  # when it was how much

    def add(self, amount: float) -> None:
        """Note that `amount` has come by now."""
        self._sums.append((self._clock(), self._sums[-1][1] + amount))
        self._forget()

    def growth(self) -> float:
        """Return what came within the window."""
        self._forget()
        return self._sums[-1][1] - self._sums[0][1]

    def per_second(self) -> float:
        """Return the mean rate over the window, or over as much of it as has passed since the beginning."""
        seconds = min(self._window, self._clock() - self._began)
        return self.growth() / seconds if seconds > 0 else 0.0

    def _forget(self) -> None:
        """Keep of what lies before the window the last: the sum with which the window begins."""
        begin = self._clock() - self._window
        while len(self._sums) > 1 and self._sums[1][0] <= begin:
            self._sums.popleft()
