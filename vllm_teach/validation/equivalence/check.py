"""Checks one configuration after another against answers that are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.request import Request
from vllm_teach.engine.request import Sequence as TokenStream
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.models.language_model import LanguageModel
from vllm_teach.validation.equivalence.agreement import Agreement, measure_agreement
from vllm_teach.validation.equivalence.configurations import ROOMY, Configuration
from vllm_teach.validation.equivalence.judge import Difference, find_differences
from vllm_teach.validation.equivalence.reference import Reference, add_noise
from vllm_teach.validation.equivalence.serve import LEAST_PREEMPTIONS, Served, serve
from vllm_teach.validation.equivalence.workload import Asked


@dataclass(frozen=True)
class Outcome:
    """What came of one configuration: each differing token, and what it was to exercise and did not (`faults`)."""

    configuration: Configuration
    num_tokens: int
    differences: list[Difference]
    preemptions: dict[str, int]
    hit_tokens: int
    num_forks: int
    seconds: float
    faults: list[str] = field(default_factory=list)
    agreement: Agreement | None = None
    rival: Agreement | None = None

    @property
    def num_excused(self) -> int:
        """Differing tokens that tie with the reference's."""
        return sum(each.excused for each in self.differences)

    @property
    def passed(self) -> bool:
        """Whether all that differs is excused, and the configuration did what it is there for."""
        return not self.faults and self.num_excused == len(self.differences)


class Checker:
    """A loaded model, the requests, and what they must give: `transformers`' tokens, or ours when alone if sampled.

    With a `rival`, transformers in the model's own low precision, tokens are not compared but judged one by one
    (`agreement`). If `demanding`, at least 20 preemptions must happen in each small pool and each prefix cache must
    have hits; few or short requests do not bring that about everywhere.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: EngineTokenizer,
        reference: Reference,
        greedy: Sequence[Asked],
        sampled: Sequence[Asked],
        *,
        rival: Reference | None = None,
        demanding: bool = True,
    ) -> None:
        self._model, self._tokenizer, self._reference, self._rival = model, tokenizer, reference, rival
        self.greedy, self.sampled = list(greedy), list(sampled)
        self._demanding = demanding
        self._expected: list[list[list[int]]] = []  # by request and completion

    def prepare(self, tell: Callable[[str], object] = lambda line: None) -> list[Difference]:
        """Compute what is expected; return where our sampled tokens, alone, are not what transformers' logits give."""
        if self._rival is not None:
            return []
        count = len(self.greedy)
        found = self._reference.continuations(
            self.greedy, tell=lambda done: done % 16 or tell(f"transformers: {done} of {count} requests")
        )
        near = sum(gap <= 1e-3 for each in found for gap in each.gaps)
        tell(f"transformers: {sum(len(each.tokens) for each in found)} tokens, {near} of them near ties")
        self._expected = [[each.tokens] for each in found]
        alone = [serve(self._llm(ROOMY, [one]), [one]).requests[0] for one in self.sampled]
        self._expected += [[stream.output_token_ids for stream in request.sequences] for request in alone]
        return [
            difference
            for number, request in enumerate(alone, start=count)
            for stream in request.sequences
            for difference in self._compare(number, request, stream, self._drawn_by_reference(request, stream))
        ]

    def check(self, configuration: Configuration) -> Outcome:
        """Run all requests in one engine of this configuration and compare."""
        asked = self.greedy + [replace(each, completions=configuration.completions) for each in self.sampled]
        served = serve(self._llm(configuration, asked), asked, None if self._rival is None else 0)
        agreement = rival = None
        differences: list[Difference] = []
        if self._rival is None:
            differences = list(self._differences(served.requests))
        else:
            agreement, rival = measure_agreement(served.requests, self._reference, self._rival)
        return Outcome(
            configuration,
            sum(len(stream.output_token_ids) for request in served.requests for stream in request.sequences),
            differences,
            served.preemptions,
            served.hit_tokens,
            served.num_forks,
            served.seconds,
            self._faults(configuration, served),
            agreement,
            rival,
        )

    def _llm(self, configuration: Configuration, asked: Sequence[Asked]) -> LLM:
        kv_bytes = self._model.config.kv_bytes_per_token(self._model.dtype.itemsize)
        return LLM.from_loaded(self._model, self._tokenizer, **configuration.limits(asked, kv_bytes))

    def _differences(self, requests: Sequence[Request]) -> Iterator[Difference]:
        for number, request in enumerate(requests):
            for stream in request.sequences:
                yield from self._compare(number, request, stream, self._expected[number][stream.index])

    def _compare(self, number: int, request: Request, stream: TokenStream, expected: Sequence[int]) -> list[Difference]:
        def scores(first: int) -> Tensor:
            tokens = stream.output_token_ids
            return add_noise(self._reference.logits(request.prompt_token_ids, tokens, first), stream, first)

        return find_differences(stream.output_token_ids, expected, scores, number, stream.index)

    def _drawn_by_reference(self, request: Request, stream: TokenStream) -> list[int]:
        """Return what transformers' logits and the stream's random numbers give after each of its tokens."""
        logits = self._reference.logits(request.prompt_token_ids, stream.output_token_ids)
        return add_noise(logits, stream).argmax(-1).tolist()

    def _faults(self, configuration: Configuration, served: Served) -> list[str]:
        """Return what would make equal tokens prove less than they seem to."""
        faults = []
        if configuration.memory == "roomy":
            if sum(served.preemptions.values()):
                faults.append(f"preemptions in a roomy pool: {served.preemptions}")
        elif self._demanding and (count := served.preemptions[configuration.memory]) < LEAST_PREEMPTIONS:
            faults.append(f"{count} preemptions by {configuration.memory}, not at least {LEAST_PREEMPTIONS}")
        if configuration.prefix_cache == "off":
            if served.hit_tokens:
                faults.append(f"{served.hit_tokens} tokens came from the prefix cache, which is off")
        elif self._demanding and not served.hit_tokens:
            faults.append("no token came from the prefix cache")
        forks = (configuration.completions - 1) * len(self.sampled)
        if served.num_forks != forks:
            faults.append(f"{served.num_forks} forks, not {forks}")
        if served.blocks_left:
            faults.append(f"{served.blocks_left} blocks are still held")
        return faults
