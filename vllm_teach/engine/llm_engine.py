"""The engine loop: takes requests, advances all of them step by step, hands out what is new."""

from __future__ import annotations

import itertools
import time

from vllm_teach.engine.config import EngineConfig, StepStats
from vllm_teach.engine.detokenizer import OutputText
from vllm_teach.engine.exclusive import Exclusive
from vllm_teach.engine.failure import engine_error, shown
from vllm_teach.engine.limits import check_limits, choose_cache_bytes, choose_max_model_len
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.engine.outputs import Logprob, RequestMetrics, RequestOutput
from vllm_teach.engine.prompts import Prompt, TokensPrompt, read_prompt
from vllm_teach.engine.request import Request, SampledToken, Sequence, SequenceStatus
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Plan, Scheduler, StepResult
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import EngineError, InvalidArgumentError, ModelLoadError, PromptTooLongError
from vllm_teach.kvcache.manager import ContiguousKVCacheManager
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.decoder import Decoder


class LLMEngine:
    """Owns scheduler, cache and runner. `step()` is three calls: schedule, execute, update.

    A request that fails ends with a typed error in its output, and its neighbours go on; when the forward pass itself
    fails, all requests of that step end so. In either case nothing stays in the cache. A Ctrl-C during `step`,
    `add_request` or `abort` is raised when it is done; a second one at once, and then the next step makes up for it. A
    thread that comes while another one is inside gets an EngineError.
    """

    def __init__(self, model: Decoder, tokenizer: EngineTokenizer, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        shape = model.config
        check_limits(config, shape, model.dtype, model.device)
        for token_id in tokenizer.stop_token_ids:
            if not 0 <= token_id < shape.vocab_size:
                raise ModelLoadError(
                    f"the end-of-text id {token_id} is not one of this model's ids, which end at "
                    f"{shape.vocab_size - 1}: correct eos_token_id in its generation_config.json or tokenizer files."
                )
        cache_bytes = choose_cache_bytes(config, shape, model.dtype, model.device)
        self.kv = ContiguousKVCacheManager(cache_bytes, shape.kv_bytes_per_token(model.dtype.itemsize))
        self.max_model_len = choose_max_model_len(config, shape, self.kv.num_slots)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.runner = ModelRunner(model, self._new_storage(cache_bytes), config.attention_backend)
        self.last_plan = Plan()
        self.last_step: StepStats | None = None
        self._requests: dict[str, Request] = {}  # the unfinished ones, in order of arrival
        self._seq_ids = itertools.count()
        self._numbers = itertools.count()  # of requests without a name of their own
        self.exclusive = Exclusive()

    def validate(self, prompt: Prompt, params: SamplingParams) -> TokensPrompt:
        """Return the prompt as checked token ids, if a request like this can run. Changes nothing.

        Raises InvalidArgumentError for a prompt that is empty or no text or token ids of this model, PromptTooLongError
        for one that leaves no room for an answer, and EngineError when the tokenizer fails on it.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"sampling_params={shown(params)} is not valid: use a SamplingParams.")
        params.copy()  # checks it again: its fields may have changed since
        vocab = self.model.config.vocab_size
        checked = read_prompt(prompt, self.tokenizer, vocab)
        count = len(checked["prompt_token_ids"])
        if count >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {count} tokens, but with at least one new token max_model_len="
                f"{self.max_model_len} allows {self.max_model_len - 1}: shorten it."
            )
        for token_id in params.stop_token_ids or ():
            if token_id >= vocab:
                raise InvalidArgumentError(
                    f"stop_token_ids={shown(params.stop_token_ids)} is not valid: this model's ids end at {vocab - 1}."
                )
        return checked

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a request and return its id. Raises what `validate` raises, and then queues nothing."""
        with self.exclusive.hold():
            return self._add_request(prompt, params, request_id)

    def _add_request(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None) -> str:
        params = SamplingParams() if params is None else params
        checked = self.validate(prompt, params)
        if request_id is None:
            request_id = next(name for name in map("request-{}".format, self._numbers) if name not in self._requests)
        elif not isinstance(request_id, str) or request_id in self._requests:
            raise InvalidArgumentError(f"request_id={shown(request_id)} is in use or no string: choose another one.")
        token_ids, params = tuple(checked["prompt_token_ids"]), params.copy()
        texts = [self._new_text(token_ids, params) for _ in range(params.n)]
        sequences = [self._new_sequence(token_ids, params, index, text) for index, text in enumerate(texts)]
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        self._requests[request_id] = Request(request_id, checked["prompt"], token_ids, params, sequences, metrics)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return request_id

    def get_request(self, request_id: str) -> Request:
        """Return the request while it is unfinished; the object stays valid afterwards. KeyError if unknown."""
        return self._requests[request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` would do something."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence and return the output so far of each request that advanced or ended."""
        with self.exclusive.hold():
            return self._step()

    def _step(self) -> list[RequestOutput]:
        started = time.perf_counter()
        self._settle()  # what an interrupted step left undone; otherwise nothing
        plan = self.scheduler.schedule()
        for request in self._requests.values():
            if request.metrics.first_scheduled_time is None and any(
                sequence.status is SequenceStatus.RUNNING for sequence in request.sequences
            ):
                request.metrics.first_scheduled_time = started
        self.scheduler.update(plan, self._execute(plan))
        self._settle()
        advanced = {item.sequence.seq_id for item in plan.items}
        touched = [
            request
            for request in self._requests.values()
            if request.finished or any(sequence.seq_id in advanced for sequence in request.sequences)
        ]
        for request in touched:
            # A Ctrl-C takes the place of what this step returns: the next one returns what ended.
            if request.finished and not self.exclusive.interrupted:
                self._forget(request)
        self.last_plan = plan
        seconds = time.perf_counter() - started
        self.last_step = StepStats(plan.num_prefill_tokens, plan.num_decode_tokens, len(plan.items), seconds)
        return [request.output() for request in touched]

    def abort(self, request: str | Request) -> None:
        """End a request and free what it holds; its sequences' finish_reason is "abort".

        Unknown ids, and requests that have ended, are left alone. What it holds is free before its last text is made.
        Waits while another thread is inside: what an abort leaves behind would stay for ever.
        """
        with self.exclusive.hold(wait=True):
            self._abort(request)

    def _abort(self, request: str | Request) -> None:
        found = self._requests.get(request) if isinstance(request, str) else request
        if found is not None and self._requests.get(found.request_id) is found:
            for sequence in found.sequences:
                if not sequence.finished:
                    self._end(sequence, "abort")
            self._forget(found)
            self._write_texts(found)

    def _execute(self, plan: Plan) -> StepResult:
        """Run the plan; an exception in the forward pass becomes the error of all its sequences."""
        if not plan.items:
            return StepResult()
        try:
            return self.runner.execute(plan)
        except Exception as error:  # noqa: BLE001 - becomes the typed error of every request in this step
            failure = engine_error("the model's forward pass failed", error, "send the request again, or fewer at once")
            return StepResult(errors={item.sequence.seq_id: failure for item in plan.items})

    def _settle(self) -> None:
        """Bring all texts up to their tokens; a stop string found there ends a sequence, an error its whole request.

        A request that ended stays until `step` returns its output, so that an interrupt loses none.
        """
        for request in self._requests.values():
            if any(sequence.new_token is not None for sequence in request.sequences):
                request.metrics.last_token_time = time.perf_counter()
                request.metrics.first_token_time = request.metrics.first_token_time or request.metrics.last_token_time
            self._write_texts(request)
            if request.error is not None:
                for sequence in request.sequences:
                    if not sequence.finished:
                        self._end(sequence, "abort")
                self._write_texts(request)

    def _write_texts(self, request: Request) -> None:
        """Bring each sequence's text up to its tokens; a failure there becomes the error of that sequence alone."""
        for sequence in request.sequences:
            try:
                self._write_text(sequence)
            except Exception as error:  # noqa: BLE001 - becomes this request's typed error
                failure = engine_error(
                    "turning a token into text failed for this request", error, "check its tokenizer"
                )
                sequence.new_token = sequence.output_text = None
                # It may have ended in this very step, by length or stop token; it failed all the same.
                self._end(sequence, "error", error=failure)

    def _write_text(self, sequence: Sequence) -> None:
        """Add the new token's log-probabilities and text to `sequence`, and at its end what was held back.

        Changes nothing before the tokenizer's last call for a token, so that it can be done again after an interrupt.
        """
        token, text, params = sequence.new_token, sequence.output_text, sequence.params
        if token is not None:
            logprobs = self._logprobs(params, token)
            stop = None
            ended_by_token = sequence.finish_reason == "stop"
            # The token that ended it is no part of its text, unless asked for.
            if text is not None and (not ended_by_token or params.include_stop_str_in_output):
                # vLLM's rule: a stop string counts from the token behind the first min_tokens.
                enough = len(sequence.output_token_ids) > params.min_tokens
                stop = text.append(token.token_id, may_stop=enough and not ended_by_token)
            sequence.new_token = None
            sequence.logprobs += logprobs
            sequence.cumulative_logprob += token.logprob or 0.0
            if stop is not None:
                # The text ended it, even where this was also the last token it was allowed.
                self._end(sequence, "stop", stop_reason=stop)
        if text is not None:
            sequence.text = text.finish() if sequence.finished else text.visible
            sequence.output_text = None if sequence.finished else text

    def _logprobs(self, params: SamplingParams, token: SampledToken) -> list[dict[int, Logprob]]:
        if params.logprobs is None:
            return []
        decode = self.tokenizer.decode if params.detokenize else None
        return [
            {
                token_id: Logprob(logprob, rank, decode([token_id], skip_special_tokens=False) if decode else None)
                for token_id, (logprob, rank) in token.top_logprobs.items()
            }
        ]

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: EngineError | None = None,
    ) -> None:
        """End `sequence` and free its slots; where it has ended already, correct the reason."""
        self.scheduler.finish(sequence, reason)
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        request.metrics.finished_time = time.perf_counter()

    def _new_storage(self, cache_bytes: int) -> KVStorage:
        shape, dtype, device = self.model.config, self.model.dtype, self.model.device
        try:
            return KVStorage(shape.num_layers, self.kv.num_slots, shape.num_kv_heads, shape.head_dim, dtype, device)
        except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:  # PyTorch's, by the size
            raise InvalidArgumentError(
                f"kv_cache_memory_bytes={shown(cache_bytes)} does not fit: {device.type} has no room for a cache of "
                "that size, so use a smaller one."
            ) from error

    def _new_sequence(
        self, token_ids: tuple[int, ...], params: SamplingParams, index: int, text: OutputText | None
    ) -> Sequence:
        seq_id = next(self._seq_ids)
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
        )

    def _new_text(self, token_ids: tuple[int, ...], params: SamplingParams) -> OutputText | None:
        if not params.detokenize:
            return None
        try:
            return OutputText(
                self.tokenizer,
                token_ids,
                stops=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        except Exception as error:
            raise engine_error("turning the prompt's end into text failed", error, "check the tokenizer") from error
