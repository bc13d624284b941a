"""When requests are sent: each after another's answer (closed loop), or at times of their own (open loop).

In a closed loop the server sets the pace: when it slows down, its clients ask less, and the figures flatter it. An open
loop asks as independent users do, however slow the answers are. There a latency counts from the time at which the
request was due, not from the time at which a busy client came to send it; who measures from the latter leaves out the
waiting that matters most ("coordinated omission": Gil Tene, "How NOT to Measure Latency", 2013).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import check_calls

PATTERNS = ("poisson", "fixed")


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when its last has ended."""

    concurrency: int = 16

    def __post_init__(self) -> None:
        check_calls("concurrency", self.concurrency, 1, "sends nothing")

    @property
    def max_in_flight(self) -> int:
        """The most requests that are open at once."""
        return self.concurrency

    def offsets(self, seed: int) -> Iterator[float | None]:
        """Yield None for ever: a request is due when a client is free."""
        return repeat(None)

    def __str__(self) -> str:
        """Return it in words."""
        return f"closed loop of {self.concurrency}"


@dataclass(frozen=True)
class OpenLoop:
    """`rate` requests a second on average, `burst` of them at the same instant.

    The gaps between bursts are all equal ("fixed"), or exponential ("poisson": users who know nothing of each other).
    No more than `max_in_flight` are open at once, for the client's sake: one that is due then waits for a place, which
    its latency includes.
    """

    rate: float
    pattern: str = "poisson"
    burst: int = 1
    max_in_flight: int = 4096

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidArgumentError(f"rate={self.rate!r} is no rate: give requests a second, above 0.")
        if self.pattern not in PATTERNS:
            raise InvalidArgumentError(f"pattern={self.pattern!r} is not known: choose one of {', '.join(PATTERNS)}.")
        check_calls("burst", self.burst, 1, "sends nothing")
        check_calls("max_in_flight", self.max_in_flight, 1, "sends nothing")

    def offsets(self, seed: int) -> Iterator[float | None]:
        """Yield the seconds from the start at which each request is due; the same for the same seed."""
        source = random.Random(f"{seed} arrivals")
        gap, time = self.burst / self.rate, 0.0
        for number in count():
            # Multiplied rather than added up: a fixed rate stays exact over a million requests.
            time = number * gap if self.pattern == "fixed" else time + source.expovariate(1 / gap)
            yield from repeat(time, self.burst)

    def __str__(self) -> str:
        """Return it in words."""
        bursts = f", {self.burst} at once" if self.burst > 1 else ""
        return f"open loop, {self.pattern}, {self.rate:g} requests a second{bursts}"


Arrivals = ClosedLoop | OpenLoop
