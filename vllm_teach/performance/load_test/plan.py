"""What a load test sends: how many requests and when, how long they are, which are to go wrong. All of it from a seed.

Nothing here knows HTTP. Requests are drawn as they are needed, so a plan of a million takes no memory; times, lengths
and fates come from sources of their own, so that adding aborts to a plan leaves its lengths as they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice, repeat

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import LengthMix
from vllm_teach.performance.load_test.arrivals import Arrivals, ClosedLoop
from vllm_teach.performance.timing import check_calls

_PAGE = 4096  # lengths that are drawn at once


@dataclass(frozen=True)
class Abort:
    """Hang up after so many events of a stream, or, where `events` is None or nothing is streamed, seconds."""

    seconds: float
    events: int | None = None


@dataclass(frozen=True)
class PlannedRequest:
    """One request: due at `offset` seconds (None: when a client is free), with lengths in tokens.

    `malformed` is a number from 0 to 1 that picks what is wrong with it, None when it is a good one.
    """

    index: int
    offset: float | None
    prompt_len: int
    output_len: int
    abort: Abort | None = None
    malformed: float | None = None


@dataclass(frozen=True)
class LoadPlan:
    """`num_requests` requests, fewer when `duration` seconds are over before; those sent by then are waited for.

    `lengths` is a mix, or one (prompt, output) pair for all. Of all requests, the share `abort_share` hangs up: half of
    them after an event between the first and the last, half after a time between 0 and `abort_within` seconds, when
    they may still wait or be in prefill. The share `malformed_share` is such as a server must refuse. `warm_up`
    requests are sent, and answered, before the clock starts; none of them goes wrong.
    """

    arrivals: Arrivals = field(default_factory=ClosedLoop)
    num_requests: int = 100
    lengths: LengthMix | tuple[int, int] = (128, 128)
    seed: int = 0
    duration: float | None = None
    warm_up: int = 0
    abort_share: float = 0.0
    abort_within: float = 1.0
    malformed_share: float = 0.0

    def __post_init__(self) -> None:
        check_calls("num_requests", self.num_requests, 1, "measures nothing")
        check_calls("warm_up", self.warm_up, 0, "is no number of requests")
        if not isinstance(self.lengths, LengthMix):
            for name, length in zip(("prompt length", "output length"), self.lengths, strict=True):
                check_calls(name, length, 1, "is no length")
        for name in ("abort_share", "malformed_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r} is no share: use 0 to 1.")
        if self.abort_share + self.malformed_share > 1:
            raise InvalidArgumentError(
                f"abort_share={self.abort_share:g} and malformed_share={self.malformed_share:g} make more than 1: "
                "use less of them."
            )
        for name in ("abort_within", "duration"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidArgumentError(f"{name}={value!r} is no time: give seconds above 0.")

    def within(self, max_total: int) -> LoadPlan:
        """Return this plan with no request of more than `max_total` tokens, prompt and output together.

        A mix is clipped, its prompts at half of that. Raises InvalidArgumentError when fixed lengths do not fit.
        """
        check_calls("max_total", max_total, 2, "holds no prompt with an output")
        if isinstance(self.lengths, LengthMix):
            mix = self.lengths
            longest = min(mix.max_total, max_total)
            prompt = min(mix.max_prompt, max_total // 2)
            return replace(self, lengths=replace(mix, max_prompt=prompt, max_total=longest))
        if sum(self.lengths) > max_total:
            prompt, output = self.lengths
            raise InvalidArgumentError(
                f"lengths of {prompt} and {output} tokens do not fit into {max_total} together: use less."
            )
        return self

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests in the order in which they are sent; the same for the same plan."""
        fates = random.Random(f"{self.seed} fates")
        offsets = self.arrivals.offsets(self.seed)
        planned = islice(zip(count(), offsets, self._lengths(self.seed), strict=False), self.num_requests)
        for index, offset, (prompt_len, output_len) in planned:
            # Four numbers for each, whatever becomes of it: a share that changes leaves its neighbours as they were.
            fate, kind, amount, way = (fates.random() for _ in range(4))
            abort = malformed = None
            if fate < self.malformed_share:
                malformed = kind
            elif fate < self.malformed_share + self.abort_share:
                events = 1 + int(amount * output_len) if way < 0.5 else None
                abort = Abort(amount * self.abort_within, events)
            yield PlannedRequest(index, offset, prompt_len, output_len, abort, malformed)

    def warm_up_requests(self) -> Iterator[PlannedRequest]:
        """Yield the requests before the clock starts, with indices below 0: their prompts are others."""
        lengths = self._lengths(self.seed - 1)
        for number, (prompt_len, output_len) in enumerate(islice(lengths, self.warm_up), 1):
            yield PlannedRequest(-number, None, prompt_len, output_len)

    def _lengths(self, seed: int) -> Iterator[tuple[int, int]]:
        if not isinstance(self.lengths, LengthMix):
            yield from repeat(self.lengths)
            return
        for page in count():  # the first is what `LengthMix.draw` returns for the seed
            yield from self.lengths.draw(_PAGE, seed + (page << 32))
