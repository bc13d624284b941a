"""What a user gets back: vLLM's `RequestOutput` and `CompletionOutput`, with their field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from vllm_teach.errors import VllmTeachError


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability under the model, its rank (1: most likely) and its text (None: not detokenized)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion. `text` is `token_ids` as text, without what a stop string cut off.

    While a request runs, `text` holds only what no later token can change, so pieces of it can be shown at once.
    `finish_reason` is None, "stop", "length", "abort" or "error"; `stop_reason` is the stop string or stop token that
    ended it, None for end-of-sequence. `logprobs` has a dict from token id to `Logprob` for each token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this completion ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of a clock whose zero means nothing (`time.perf_counter`).

    `token_times` has the end of each step that brought tokens, to any of its completions. A copy has its own list.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished_time: float | None = None

    def __post_init__(self) -> None:
        self.token_times = list(self.token_times)

    @property
    def first_token_time(self) -> float | None:
        """When the first token came."""
        return self.token_times[0] if self.token_times else None

    @property
    def last_token_time(self) -> float | None:
        """When the last token so far came."""
        return self.token_times[-1] if self.token_times else None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the request was first in a step."""
        return self._since_arrival(self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return self._since_arrival(self.first_token_time)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return self._since_arrival(self.finished_time)

    @property
    def inter_token_times(self) -> list[float]:
        """Seconds between one token and the next (ITL), a preemption's wait included: one fewer than tokens."""
        return [after - before for before, after in pairwise(self.token_times)]

    def time_per_output_token(self, num_output_tokens: int) -> float | None:
        """Return mean seconds between tokens after the first (TPOT); None with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None or num_output_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (num_output_tokens - 1)

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrival_time


@dataclass
class RequestOutput:
    """A request's state after a step, or its result. `error` says why it failed; then `outputs` is what there was.

    `prompt_logprobs`, if asked for, has a dict from token id to `Logprob` for each token of the prompt, and None for
    the first, which nothing predicts; as long as the prompt is not computed, only for those that are.
    `num_cached_tokens` is how many tokens of the prompt came out of the prefix cache when it was first scheduled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    error: VllmTeachError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
