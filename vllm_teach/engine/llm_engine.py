"""The engine loop: takes requests, advances all of them step by step, hands out what is new."""

from __future__ import annotations

import itertools
import time
from functools import partial

from vllm_teach.engine.assembly import make_scheduler_config, make_storage
from vllm_teach.engine.config import EngineConfig, StepStats
from vllm_teach.engine.detokenizer import OutputText
from vllm_teach.engine.driving_runner import DrivingRunner
from vllm_teach.engine.events import EventLog
from vllm_teach.engine.exclusive import Exclusive
from vllm_teach.engine.failure import engine_error, shown
from vllm_teach.engine.limits import (
    check_limits,
    check_pattern,
    choose_max_model_len,
    choose_num_blocks,
    choose_num_host_blocks,
)
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.engine.output_writer import OutputWriter
from vllm_teach.engine.outputs import RequestMetrics, RequestOutput
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.engine.prompts import Prompt, TokensPrompt
from vllm_teach.engine.ranks import Ranks
from vllm_teach.engine.request import Request, Sequence, SequenceStatus
from vllm_teach.engine.request_checks import check_priority, check_request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Scheduler
from vllm_teach.engine.step_totals import StepTotals
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import EngineDeadError, EngineError, InvalidArgumentError, ModelLoadError
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.placement import longest_sequence
from vllm_teach.models.language_model import LanguageModel


class LLMEngine:
    """Owns scheduler, cache and runner. `step()` is three calls: schedule, execute, update.

    `kv` has the cache's bookkeeping (`kv.usage()` its figures), `events` what happened, `last_plan` and `last_step`
    what the last step did, `totals` what all did; `ranks` are the other processes that compute, None without them.

    A request that fails ends with a typed error in its output, and its neighbours go on; when the forward pass itself
    fails, all requests of that step end so. In either case nothing stays in the cache. A Ctrl-C during `step`,
    `add_request` or `abort` is raised when it is done; a second one at once. In the forward pass, where the time goes,
    the next step makes up for it; in the midst of the bookkeeping it may leave blocks held. Who comes while another
    thread is inside, or calls from within, as a model or a tokenizer could, gets an EngineError; only an abort waits.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: EngineTokenizer, config: EngineConfig, ranks: Ranks | None = None
    ) -> None:
        self.model, self.tokenizer, self.config, self.ranks = model, tokenizer, config, ranks
        shape = model.config
        check_limits(config, shape, model.dtype, model.device)
        for token_id in tokenizer.stop_token_ids:
            if not 0 <= token_id < shape.vocab_size:
                raise ModelLoadError(
                    f"the end-of-text id {token_id} is not one of this model's ids, which end at "
                    f"{shape.vocab_size - 1}: correct eos_token_id in its generation_config.json or tokenizer files."
                )
        num_sharing = 1 if ranks is None else ranks.num_sharing
        num_blocks = choose_num_blocks(config, shape, model.dtype, model.device, num_sharing)
        num_host_blocks = choose_num_host_blocks(config, shape, model.dtype)
        # Before any memory is taken: who keeps the error of a refused engine would keep that, too.
        most = longest_sequence(config.kv_placement, num_blocks) * config.block_size
        self.max_model_len = choose_max_model_len(config, shape, most)
        check_pattern(config.attention_pattern, self.max_model_len)
        storage = make_storage(config, model, num_blocks, num_host_blocks)
        make_runner = ModelRunner if ranks is None else partial(DrivingRunner, ranks)
        self.runner = make_runner(model, storage, config.attention_backend, config.attention_pattern)
        self.events = EventLog(max_events=config.max_events)
        self.kv = KVCacheManager(
            num_blocks,
            config.block_size,
            prefix_cache=config.prefix_cache if config.enable_prefix_caching else None,
            eviction=config.eviction_policy,
            placement=config.kv_placement,
            num_host_blocks=num_host_blocks,
            record=self.events.record,
        )
        self.scheduler = Scheduler(self.kv, make_scheduler_config(config, model, self.max_model_len), self.events)
        self.writer = OutputWriter(tokenizer, self._end)
        self.last_plan = Plan()
        self.last_step: StepStats | None = None
        self.totals = StepTotals()
        self._requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self._unsettled = False  # whether tokens may be there that have no text yet
        self.seq_ids = itertools.count()
        self._numbers = itertools.count()  # of requests without a name of their own
        self.exclusive = Exclusive()

    def validate(self, prompt: Prompt, params: SamplingParams) -> TokensPrompt:
        """Return the prompt as checked token ids, if a request like this can run. Changes nothing.

        Raises InvalidArgumentError for a prompt that is empty or no text or token ids of this model, PromptTooLongError
        for one that leaves no room for an answer, and EngineError when the tokenizer fails on it.
        """
        vocab_size = self.model.config.vocab_size
        return check_request(prompt, params, self.tokenizer, vocab_size=vocab_size, max_model_len=self.max_model_len)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Raises what `validate` raises, and then queues nothing.

        With `scheduling_policy="priority"` the request with the smallest `priority` goes first, as in vLLM; "fcfs" has
        no use for it.
        """
        with self.exclusive.change():
            return self._add_request(prompt, params, request_id, priority)

    def _add_request(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int) -> str:
        params = SamplingParams() if params is None else params
        checked = self.validate(prompt, params)
        priority = check_priority(priority)
        if request_id is None:
            request_id = next(name for name in map("request-{}".format, self._numbers) if name not in self._requests)
        elif not isinstance(request_id, str) or request_id in self._requests:
            raise InvalidArgumentError(f"request_id={shown(request_id)} is in use or no string: choose another one.")
        token_ids, params = tuple(checked["prompt_token_ids"]), params.copy()
        texts = [self.writer.new_text(token_ids, params) for _ in range(params.n)]
        sequences = [self._new_sequence(token_ids, params, index, text) for index, text in enumerate(texts)]
        for sequence in sequences:
            sequence.priority, sequence.salt = priority, checked["cache_salt"] or ""
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        request = Request(request_id, checked["prompt"], token_ids, params, sequences, metrics)
        # The prompt is computed once; the other completions branch off when it is.
        sequences[0].forks = sequences[1:]
        self.scheduler.add(sequences[0])
        self._requests[request_id] = request
        return request_id

    def get_request(self, request_id: str) -> Request:
        """Return the request while it is unfinished; the object stays valid afterwards. KeyError if unknown."""
        return self._requests[request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` would do something."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence and return the output so far of each request that advanced or ended.

        Raises EngineError when none can advance, as beside a beam search that holds the blocks.
        """
        with self.exclusive.change():
            return self._step()

    def _step(self) -> list[RequestOutput]:
        started = time.perf_counter()
        if self._unsettled:  # an interrupted step left it so
            self._settle()
        plan = self.scheduler.schedule()
        if not (plan.items or plan.transfers or plan.preempted) and self.scheduler.has_unfinished():
            raise EngineError("no request has room to run, as a beam search holds the KV cache: close it first.")
        for request in self._requests.values():
            if request.metrics.first_scheduled_time is None and any(
                sequence.status is SequenceStatus.RUNNING for sequence in request.sequences
            ):
                request.metrics.first_scheduled_time = started
        result = self._execute(plan)
        self._unsettled = True
        advanced = {sequence.seq_id for sequence in self.scheduler.update(plan, result)}
        self._settle()
        touched = [
            request
            for request in self._begun()
            if request.finished or any(sequence.seq_id in advanced for sequence in request.sequences)
        ]
        for request in touched:
            # A Ctrl-C takes the place of what this step returns: the next one returns what ended.
            if request.finished and not self.exclusive.interrupted:
                self._forget(request)
        self.last_plan = plan
        seconds = time.perf_counter() - started
        self.last_step = StepStats(plan.num_prefill_tokens, plan.num_decode_tokens, len(plan.items), seconds)
        self.totals.add(plan, result, self.last_step)
        self.scheduler.observe(seconds)
        return [request.output() for request in touched]

    def reset_prefix_cache(self) -> None:
        """Forget every computed prefix. Requests that run keep what they hold."""
        with self.exclusive.change():
            self.kv.reset_prefix_cache()

    def abort(self, request: str | Request) -> None:
        """End a request and free what it holds; its sequences' finish_reason is "abort".

        Unknown ids, and requests that have ended, are left alone. What it holds is free before its last text is made.
        Waits while another thread is inside: what an abort leaves behind would stay for ever. In the middle of a step,
        as when the garbage collector closes a forgotten stream, it is put off to the step's end. Raises
        InvalidArgumentError for what is neither.
        """
        if not isinstance(request, str | Request):
            raise InvalidArgumentError(f"request={shown(request)} is not valid: use a request or its id.")
        with self.exclusive.hold(wait=True):
            self.exclusive.at_end(partial(self._abort, request))

    def _abort(self, request: str | Request) -> None:
        found = self._requests.get(request) if isinstance(request, str) else request
        if found is not None and self._requests.get(found.request_id) is found:
            try:
                self._end_all(found)
            except KeyboardInterrupt:  # a second Ctrl-C
                self._end_all(found)  # nobody would come back to it
                raise

    def _end_all(self, request: Request) -> None:
        """End what runs of `request` and write its last text. Can be done again after an interrupt."""
        for sequence in request.sequences:
            if not sequence.finished:
                self._end(sequence, "abort")
        self._forget(request)
        self.writer.write(request)

    def _execute(self, plan: Plan) -> StepResult:
        """Run the plan; an exception in the forward pass becomes the error of all its sequences."""
        if not plan.items and not plan.transfers:
            return StepResult()
        try:
            return self.runner.execute(plan)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - becomes the typed error of every request in this step
            failure = engine_error("the model's forward pass failed", error, "send the request again, or fewer at once")
            failed = [each for item in plan.items for each in (item.sequence, *item.sequence.forks)]
            return StepResult(errors={sequence.seq_id: failure for sequence in failed})

    def _begun(self) -> list[Request]:
        """Return the requests that were in a step; nothing is new of the others, which may be thousands."""
        return [each for each in self._requests.values() if each.metrics.first_scheduled_time is not None]

    def _settle(self) -> None:
        """Bring all texts up to their tokens; a stop string found there ends a sequence, an error its whole request.

        A request that ended stays until `step` returns its output, so that an interrupt loses none.
        """
        for request in self._begun():
            if any(sequence.new_token is not None for sequence in request.sequences):
                request.metrics.token_times.append(time.perf_counter())
            self.writer.write(request)
            if request.error is not None:
                for sequence in request.sequences:
                    if not sequence.finished:
                        self._end(sequence, "abort")
                self.writer.write(request)
        self._unsettled = False

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: EngineError | None = None,
    ) -> None:
        """End `sequence` and free its blocks; where it has ended already, correct the reason."""
        self.scheduler.finish(sequence, reason)
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        request.metrics.finished_time = time.perf_counter()

    def _new_sequence(
        self, token_ids: tuple[int, ...], params: SamplingParams, index: int, text: OutputText | None
    ) -> Sequence:
        seq_id = next(self.seq_ids)
        room = self.max_model_len - len(token_ids)
        seeded = params.seed is not None
        return Sequence(
            seq_id=seq_id,
            index=index,
            prompt_token_ids=token_ids,
            params=params,
            max_total_tokens=len(token_ids) + (room if params.max_tokens is None else min(room, params.max_tokens)),
            stop_ids=params.stop_ids(self.tokenizer.stop_token_ids),
            random_source=f"seed {params.seed} {index}" if seeded else f"engine {self.config.seed} {seq_id}",
            output_text=text,
            # Cached tokens are not computed, so they have no logits.
            share_prefix=params.prompt_logprobs is None,
        )
