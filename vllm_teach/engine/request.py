"""A request is what a user sent; a sequence is one stream of tokens that answers it (a request has `n` of them)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum

from vllm_teach.engine.detokenizer import OutputText
from vllm_teach.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import VllmTeachError


class SequenceStatus(Enum):
    """Where a sequence is: it moves from left to right and never back."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class SampledToken:
    """The token chosen for a sequence in one step, and if asked for its own and the top log-probabilities."""

    token_id: int
    logprob: float | None = None
    # token id -> (log-probability, rank); the chosen token is always among them.
    top_logprobs: dict[int, tuple[float, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Sequence:
    """One token stream. The scheduler moves it through its states; the engine appends text.

    `num_computed` tokens, counted from the first of the prompt, have their K and V in the cache. A sequence may grow to
    `max_total_tokens`, prompt included. `random_source` names its own random numbers: no other sequence has them.
    `output_text` makes its text (None: not detokenized); `new_token` is the last token until that is done.
    """

    seq_id: int
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    stop_ids: frozenset[int]
    random_source: str
    output_text: OutputText | None = None
    output_token_ids: list[int] = field(default_factory=list)
    new_token: SampledToken | None = None
    num_computed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    text: str = ""
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: VllmTeachError | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        """Whether it ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def tokens(self, start: int, count: int) -> list[int]:
        """Return the tokens at positions `start` to `start + count - 1`, from prompt and output."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : start - prompt + count]
        return [*self.prompt_token_ids[start:], *self.output_token_ids][:count]

    def random_seed(self) -> int:
        """Return the seed of the next token's random numbers: 32 bits, a hash of `random_source` and its position.

        Asked twice it is the same number, so a step that was interrupted and runs again draws the same token.
        """
        name = f"{self.random_source} token {len(self.output_token_ids)}"
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()  # PyTorch's generator takes no more
        return int.from_bytes(digest, "big")

    def completion(self) -> CompletionOutput:
        """Return a snapshot for the user."""
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.output_token_ids),
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=list(self.logprobs) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(eq=False)
class Request:
    """What a user sent, its sequences and its times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sequences: list[Sequence]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Whether all its sequences ended."""
        return all(sequence.finished for sequence in self.sequences)

    @property
    def error(self) -> VllmTeachError | None:
        """The first error among its sequences."""
        return next((sequence.error for sequence in self.sequences if sequence.error is not None), None)

    def output(self) -> RequestOutput:
        """Return a snapshot for the user, whose lists and times are its own."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sequence.completion() for sequence in self.sequences],
            finished=self.finished,
            metrics=replace(self.metrics),
            error=self.error,
        )
