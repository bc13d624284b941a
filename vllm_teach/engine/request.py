"""A request is what a user sent; a sequence is one stream of tokens that answers it (a request has `n` of them)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum

from vllm_teach.engine.detokenizer import OutputText
from vllm_teach.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import VllmTeachError

# Token id -> (log-probability, rank) under the model's own distribution.
TopLogprobs = dict[int, tuple[float, int]]


class SequenceStatus(Enum):
    """Where a sequence is. Preempted, it goes from RUNNING back to WAITING, or to SWAPPED and then to RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True)
class SampledToken:
    """The token chosen for a sequence in one step, and if asked for its own and the top log-probabilities."""

    token_id: int
    logprob: float | None = None
    # The chosen token is always among them.
    top_logprobs: TopLogprobs = field(default_factory=dict)


@dataclass(eq=False)
class Sequence:
    """One token stream. The scheduler moves it through its states; the engine appends text.

    `num_computed` tokens, counted from the first of the prompt, have their K and V in the cache. A sequence may grow to
    `max_total_tokens`, prompt included. `random_source` names its own random numbers: no other sequence has them.
    `output_text` makes its text (None: not detokenized); `new_token` is the last token until that is done.

    `priority` (lower goes first) and `arrival`, the number that the scheduler gives out, order the queue. `salt` keeps
    prefixes apart that must not be shared; with `share_prefix` False the whole prompt is computed, whatever the cache
    has. `num_cached_tokens` of the prompt came from the cache when it was first admitted. It is looked up again after a
    preemption, but enters the statistics of hits once (`in_hit_statistics`). `forks` are the siblings that branch off
    when the prompt is computed (n > 1); until then they are nowhere else, and they wait. `prompt_logprobs[p]` is about
    the prompt's token at position p, None for the first.
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
    priority: int = 0
    arrival: int = 0
    salt: str = ""
    share_prefix: bool = True
    num_preemptions: int = 0
    in_hit_statistics: bool = False
    num_cached_tokens: int = 0
    forks: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing(self) -> int:
        """How many tokens are to be computed before the next one can be drawn.

        At least one: a prediction needs the last token, also if an interrupt fell between counting it and drawing.
        """
        return max(1, self.num_tokens - self.num_computed)

    @property
    def in_prefill(self) -> bool:
        """Whether more than its last token is missing: its prompt, or after a preemption more."""
        return self.num_tokens - self.num_computed > 1

    @property
    def is_decoding(self) -> bool:
        """Whether it runs and only its last token is missing: each step has one token for each of these."""
        return self.status is SequenceStatus.RUNNING and not self.in_prefill

    @property
    def finished(self) -> bool:
        """Whether it ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def tokens(self, start: int, count: int) -> list[int]:
        """Return the tokens at positions `start` to `start + count - 1`, from prompt and output."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : start - prompt + count]
        head = self.prompt_token_ids[start : start + count]
        return [*head, *self.output_token_ids[: count - len(head)]]

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
    """What a user sent, its sequences and its times.

    `prompt_logprobs` grows as the prompt is computed, None first, if the parameters ask for it; else it stays empty.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sequences: list[Sequence]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

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
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=self.sequences[0].num_cached_tokens,
        )
