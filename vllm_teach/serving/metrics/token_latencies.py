"""How long requests wait for their tokens, told while they run: a dashboard must not wait for their ends."""

from __future__ import annotations

from vllm_teach.engine.bucket_counts import BucketCounts
from vllm_teach.engine.outputs import RequestMetrics

# vLLM's bounds, and finer ones below for the time between tokens: a small model answers within vLLM's first bucket.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_TIME_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)


class TokenLatencies:
    """Distributions of the seconds to a request's `first` token and `between` one token and the next, as they come.

    A request has one first token, and in each step one more at most, however many completions it has.
    """

    def __init__(self) -> None:
        self.first, self.between = BucketCounts(FIRST_TOKEN_BOUNDS), BucketCounts(TOKEN_TIME_BOUNDS)

    def add(self, times: RequestMetrics, step_began: float) -> None:
        """Count the wait for the token that came in the step that began at `step_began`, if one came.

        `step_began` is by the clock of `times`. Call it once for each request that a step advanced.
        """
        if times.last_token_time is None or times.last_token_time < step_began:
            return
        if len(times.token_times) == 1:
            self.first.add(times.last_token_time - times.arrival_time)
        else:
            self.between.add(times.last_token_time - times.token_times[-2])
