"""`vllm-teach bench serve`: put an OpenAI-compatible server under load, and report what its users would see."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import LengthMix
from vllm_teach.performance.load_test.client import LoadClient
from vllm_teach.performance.load_test.loop_watch import LoopWatch
from vllm_teach.performance.load_test.open_files import allow_connections
from vllm_teach.performance.load_test.plan import LoadPlan, PlannedRequest
from vllm_teach.performance.load_test.prompts import MOST_TEXTS, Codec, PromptSource, fit_texts, load_text_ids
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.report import LoadReport
from vllm_teach.performance.load_test.requests import Prompt, RequestForm
from vllm_teach.performance.load_test.tally import LoadTally, Slo
from vllm_teach.performance.load_test.target import LocalCodec, ServerCodec, ServerInfo, Target, describe_server

if TYPE_CHECKING:
    from vllm_teach.models.tokenizer import Tokenizer

# Tokens that a chat's template may add to a message: what a mix draws leaves room for them.
_TEMPLATE = 64


@dataclass(frozen=True)
class ServeBenchOptions:
    """How the requests of a plan are put and judged.

    `model` None is the first that the server lists. A prompt is sent as token ids, or as text if `texts` or `chat` is
    set. `ignore_eos` asks for outputs exactly as long as planned, with a field that vLLM and this package know.
    `extra` fields are added to each request. `max_total` bounds prompt and output together, by default at what the
    server says its model takes. `timeout` is in seconds, for a whole request. `keep_text` records what was answered.
    """

    model: str | None = None
    chat: bool = False
    stream: bool = True
    texts: bool = False
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    shared_prefix: int = 0
    max_total: int | None = None
    timeout: float = 600.0
    slo: Slo | None = None
    keep_text: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InvalidArgumentError(f"timeout={self.timeout!r} is no time: give seconds above 0.")
        if not self.stream and self.slo is not None and {"ttft", "tpot"} & self.slo.limits.keys():
            raise InvalidArgumentError(
                f"slo={self.slo.limits} limits what only a stream shows: set stream=True, or limit e2e alone."
            )


class ServeBench:
    """One load test: `run` it once (in a notebook: `await`); `report` what there is, also after it was cancelled.

    The tokenizer is the server's own, which it lends by /tokenize, unless one is given. `on_record` is told each
    measured request as it ends, in the event loop: it must be quick.
    """

    def __init__(
        self,
        target: Target,
        plan: LoadPlan,
        options: ServeBenchOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.target, self.plan, self.options = target, plan, options or ServeBenchOptions()
        self.interrupted = False
        self._tokenizer, self._on_record = tokenizer, on_record
        self._tally, self._watch = LoadTally(self.options.slo), LoopWatch()
        self._info = ServerInfo("")
        self._client: LoadClient | None = None

    @property
    def has_begun(self) -> bool:
        """Whether requests that count have been sent."""
        return self._client is not None and self._client.started is not None

    async def run(self) -> LoadReport:
        """Make the prompts, warm up, send all requests, wait for their ends, and return the report.

        Raises ServerError when the server does not answer before the test, InvalidArgumentError when the lengths do not
        fit into its context or the system allows fewer connections, MissingDependencyError without aiohttp, and what
        `on_record` raises. When cancelled, it hangs up on what is in flight.
        """
        options, plan = self.options, self.plan
        allow_connections(min(plan.arrivals.max_in_flight, max(plan.num_requests, plan.warm_up)))
        async with self.target.session() as session:
            self._info = info = await describe_server(session, self.target, options.model)
            longest = options.max_total or info.max_model_len
            if longest is not None:
                self.plan = plan.within(max(2, longest - _TEMPLATE * options.chat))
            tokenizer = self._tokenizer
            codec = ServerCodec(session, self.target, info.model) if tokenizer is None else LocalCodec(tokenizer)
            self._client = client = LoadClient(
                session,
                self.target,
                RequestForm(info.model, options.chat, options.stream, options.ignore_eos, extra=options.extra),
                self.plan,
                await self._prompts(codec),
                self._record,
                timeout=options.timeout,
                keep_text=options.keep_text,
                count_tokens=None if tokenizer is None else lambda text: len(tokenizer.encode(text, False)),
            )
            await client.warm_up()
            watching = asyncio.create_task(self._watch.watch())
            try:
                with _quiet_collector():
                    await client.run()
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
        return self.report()

    def report(self) -> LoadReport:
        """Return the figures so far. Raises InvalidArgumentError when no request that counts has been sent."""
        if self._client is None or not self.has_begun:
            raise InvalidArgumentError("the load test has no figures: let it run first.")
        plan, info, form = self.plan, self._info, self._client.form
        way = "streamed" if form.stream else "not streamed"
        until = "" if plan.duration is None else f" or {plan.duration:g} s"
        return LoadReport(
            tally=self._tally,
            client=self._watch,
            headline=f"{info.model} at {self.target.root}{form.path}, {way}; "
            f"{plan.arrivals}, {plan.num_requests:,} requests{until} (seed {plan.seed})",
            prompts=self._describe_prompts(),
            server=asdict(info) | {"base_url": self.target.base_url},
            plan=asdict(plan) | {"arrivals": str(plan.arrivals), "options": asdict(self.options)},
            held_back=self._client.held_back,
            unfinished=self._client.unfinished,
            interrupted=self.interrupted,
        )

    async def _prompts(self, codec: Codec) -> Callable[[PlannedRequest], tuple[Prompt, int]]:
        """Return what gives each request its prompt: ids, cut when they are asked for, or texts made beforehand."""
        source = PromptSource(await load_text_ids(codec), self.plan.seed, self.options.shared_prefix)
        if not (self.options.texts or self.options.chat):
            return lambda request: (source.ids(request.index, request.prompt_len), request.prompt_len)
        texts = await fit_texts(codec, source, self.plan.requests())
        others = await fit_texts(codec, source, self.plan.warm_up_requests())

        def text_of(request: PlannedRequest) -> tuple[Prompt, int]:
            found = texts[request.index % len(texts)] if request.index >= 0 else others[-request.index % len(others)]
            return found.text, found.num_tokens

        return text_of

    def _describe_prompts(self) -> str:
        options, lengths = self.options, self.plan.lengths
        if isinstance(lengths, LengthMix):
            told = f"lengths of the {lengths.name} mix, at most {lengths.max_prompt:,} in, {lengths.max_total:,} in all"
        else:
            told = f"{lengths[0]:,} tokens in, {lengths[1]:,} out"
        as_text = options.texts or options.chat
        told += ", prompts as text" if as_text else ", prompts as token ids"
        if options.chat:
            told += ", to which the chat template adds"
        if options.shared_prefix:
            told += f", the first {options.shared_prefix:,} tokens shared"
        if as_text and self.plan.num_requests > MOST_TEXTS:
            told += f", {MOST_TEXTS:,} different ones"
        return told

    def _record(self, record: RequestRecord) -> None:
        self._tally.add(record)
        if self._on_record is not None:
            self._on_record(record)


def run_until_interrupted(bench: ServeBench) -> LoadReport:
    """Run `bench` in an event loop of its own; Ctrl-C ends it, and the report has what there is by then.

    A Ctrl-C before the first measured request is a KeyboardInterrupt, as is a second one.
    """

    async def main() -> None:
        try:
            await bench.run()
        except asyncio.CancelledError:  # what asyncio.run makes of the first Ctrl-C
            if not bench.has_begun:
                raise
            bench.interrupted = True

    asyncio.run(main())
    return bench.report()


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Let Python's collector pass over what is there already: a walk through all modules stops the loop for long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
