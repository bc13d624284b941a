"""The engine loop: takes requests, advances all of them step by step, hands out what is new."""

from __future__ import annotations

import itertools
import random
import time

from vllm_teach.engine.config import EngineConfig, StepStats
from vllm_teach.engine.detokenizer import OutputText
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.engine.outputs import Logprob, RequestMetrics, RequestOutput
from vllm_teach.engine.request import Request, SampledToken, Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Plan, Scheduler, StepResult
from vllm_teach.engine.text import EngineTokenizer
from vllm_teach.errors import EngineError, InvalidArgumentError, PromptTooLongError
from vllm_teach.kvcache.manager import ContiguousKVCacheManager
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.decoder import Decoder

Prompt = str | list[int]


class LLMEngine:
    """Owns scheduler, cache and runner. `step()` is three calls: schedule, execute, update.

    A request that fails ends with a typed error in its output, and its neighbours go on; when the forward pass itself
    fails, all requests of that step end so. In either case nothing stays in the cache. Not safe for several threads.
    """

    def __init__(self, model: Decoder, tokenizer: EngineTokenizer, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        shape = model.config
        self.kv = ContiguousKVCacheManager(config.kv_cache_bytes, shape.kv_bytes_per_token(model.dtype.itemsize))
        self.max_model_len = self._choose_max_model_len()
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        storage = KVStorage(
            shape.num_layers, self.kv.num_slots, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self.runner = ModelRunner(model, storage, config.attention_backend)
        self.last_plan = Plan()
        self.last_step: StepStats | None = None
        self._requests: dict[str, Request] = {}
        self._request_of: dict[int, Request] = {}
        self._texts: dict[int, OutputText] = {}
        self._seq_ids = itertools.count()
        self._arrivals = itertools.count()

    def validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return the prompt's token ids if a request like this can run. Changes nothing.

        Raises InvalidArgumentError for a prompt that is empty or no text or token ids of this model, and
        PromptTooLongError for one that leaves no room for an answer.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"sampling_params={params!r} is not valid: use a SamplingParams.")
        params.copy()  # checks it again: its fields may have changed since
        token_ids = self._encode(prompt)
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, but with at least one new token max_model_len="
                f"{self.max_model_len} allows {self.max_model_len - 1}: shorten it."
            )
        vocab = self.model.config.vocab_size
        for token_id in params.stop_token_ids or ():
            if token_id >= vocab:
                raise InvalidArgumentError(
                    f"stop_token_ids={params.stop_token_ids} is not valid: this model's ids end at {vocab - 1}."
                )
        return token_ids

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a request and return its id. Raises what `validate` raises, and then queues nothing."""
        params = SamplingParams() if params is None else params
        token_ids = self.validate(prompt, params)
        params = params.copy()
        arrival = next(self._arrivals)
        request_id = f"request-{arrival}" if request_id is None else request_id
        if request_id in self._requests:
            raise InvalidArgumentError(f"request_id={request_id!r} is in use: choose another or wait until it ends.")
        sequences = [self._new_sequence(token_ids, params, index, arrival) for index in range(params.n)]
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, text, token_ids, params, sequences, metrics)
        for sequence in sequences:
            self.scheduler.add(sequence)
            self._request_of[sequence.seq_id] = request
        self._requests[request_id] = request
        return request_id

    def get_request(self, request_id: str) -> Request:
        """Return the request while it is unfinished; the object stays valid afterwards. KeyError if unknown."""
        return self._requests[request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` would do something."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence and return the output so far of each request that advanced or ended."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        for item in plan.items:
            metrics = self._request_of[item.sequence.seq_id].metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or started
        result = self._execute(plan)
        sequences = self.scheduler.update(plan, result)
        for sequence in sequences:
            if sequence.error is None:
                self._add_output(sequence, result.tokens[sequence.seq_id])
        now = time.perf_counter()
        for sequence in sequences:
            metrics = self._request_of[sequence.seq_id].metrics
            if sequence.error is None:
                metrics.first_token_time = metrics.first_token_time or now
                metrics.last_token_time = now
        self.last_plan = plan
        self.last_step = StepStats(plan.num_prefill_tokens, plan.num_decode_tokens, len(plan.items), now - started)
        touched = {id(request): request for request in (self._request_of[each.seq_id] for each in sequences)}
        return [self._output(request, now) for request in touched.values()]

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; its sequences' finish_reason is "abort". Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                if not sequence.finished and sequence.params.detokenize:
                    sequence.text = self._texts[sequence.seq_id].finish()
                self.scheduler.finish(sequence, "abort")
            self._output(request, time.perf_counter())

    def _execute(self, plan: Plan) -> StepResult:
        """Run the plan; an exception in the forward pass becomes the error of all its sequences."""
        if not plan.items:
            return StepResult()
        try:
            return self.runner.execute(plan)
        except Exception as error:  # noqa: BLE001 - becomes the typed error of every request in this step
            failure = EngineError(
                f"the model's forward pass failed ({error!r}): send the request again, or fewer at once."
            )
            failure.__cause__ = error
            return StepResult(errors={item.sequence.seq_id: failure for item in plan.items})

    def _add_output(self, sequence: Sequence, token: SampledToken) -> None:
        """Add the new token's log-probabilities and text to `sequence`; a failure there ends this sequence alone."""
        try:
            self._add_logprobs(sequence, token)
            if sequence.params.detokenize:
                self._add_text(sequence, token.token_id)
        except Exception as error:  # noqa: BLE001 - becomes this request's typed error
            failure = EngineError(
                f"turning a token into text failed for this request ({error!r}): check its tokenizer."
            )
            failure.__cause__ = error
            self.scheduler.finish(sequence, "error", error=failure)
            # It may have ended in this very step, by length or stop token; it failed all the same.
            sequence.finish_reason, sequence.error = "error", failure

    def _add_text(self, sequence: Sequence, token_id: int) -> None:
        params, text = sequence.params, self._texts[sequence.seq_id]
        ended_by_token = sequence.finish_reason == "stop"
        stop = None
        # The token that ended it is no part of its text, unless asked for.
        if not ended_by_token or params.include_stop_str_in_output:
            enough = len(sequence.output_token_ids) >= params.min_tokens
            stop = text.append(token_id, may_stop=enough and not ended_by_token)
        if stop is not None:
            self.scheduler.finish(sequence, "stop", stop_reason=stop)
            # The text ended it, even where this was also the last token it was allowed.
            sequence.finish_reason, sequence.stop_reason = "stop", stop
            sequence.text = text.visible
        else:
            sequence.text = text.finish() if sequence.finished else text.visible

    def _add_logprobs(self, sequence: Sequence, token: SampledToken) -> None:
        if sequence.params.logprobs is None or token.logprob is None:
            return
        decode = self.tokenizer.decode if sequence.params.detokenize else None
        sequence.cumulative_logprob += token.logprob
        sequence.logprobs.append(
            {
                token_id: Logprob(logprob, rank, decode([token_id], skip_special_tokens=False) if decode else None)
                for token_id, (logprob, rank) in token.top_logprobs.items()
            }
        )

    def _output(self, request: Request, now: float) -> RequestOutput:
        """Return the request's snapshot. One sequence's error ends its siblings; an ended request is forgotten."""
        if request.error is not None:
            for sequence in request.sequences:
                self.scheduler.finish(sequence, "abort")
        if request.finished:
            request.metrics.finished_time = now
            self._requests.pop(request.request_id, None)
            for sequence in request.sequences:
                self._request_of.pop(sequence.seq_id, None)
                self._texts.pop(sequence.seq_id, None)
        return request.output()

    def _new_sequence(self, token_ids: list[int], params: SamplingParams, index: int, arrival: int) -> Sequence:
        room = self.max_model_len - len(token_ids)
        source = f"seed {params.seed}" if params.seed is not None else f"engine {self.config.seed} request {arrival}"
        sequence = Sequence(
            seq_id=next(self._seq_ids),
            index=index,
            prompt_token_ids=token_ids,
            params=params,
            max_total_tokens=len(token_ids) + (room if params.max_tokens is None else min(room, params.max_tokens)),
            stop_ids=params.stop_ids(self.tokenizer.stop_token_ids),
            random=random.Random(f"{source} sequence {index}"),
        )
        if params.detokenize:
            self._texts[sequence.seq_id] = OutputText(
                self.tokenizer,
                token_ids,
                stops=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        return sequence

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                token_ids = self.tokenizer.encode(prompt) if prompt else []
            except (UnicodeError, TypeError) as error:  # half of a surrogate pair is a str, but no text
                raise InvalidArgumentError(f"the prompt is no valid text ({error}): remove what is broken.") from error
        elif isinstance(prompt, list | tuple):
            token_ids = list(prompt)
            vocab = self.model.config.vocab_size
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab:
                    raise InvalidArgumentError(
                        f"the prompt holds {token_id!r}, which is no token id: use whole numbers from 0 to {vocab - 1}."
                    )
        else:
            raise InvalidArgumentError(
                f"the prompt is of type {type(prompt).__name__}, which is not valid: use a text or a list of token ids."
            )
        if not token_ids:
            raise InvalidArgumentError(f"prompt={prompt!r} is empty: give at least one token.")
        return token_ids

    def _choose_max_model_len(self) -> int:
        wanted, context, slots = self.config.max_model_len, self.model.config.max_position, self.kv.num_slots
        if wanted is None:
            return min(context, slots)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 2 <= wanted <= context:
            raise InvalidArgumentError(f"max_model_len={wanted!r} is not valid: use 2 to {context}, the context.")
        if wanted > slots:
            raise InvalidArgumentError(
                f"max_model_len={wanted} does not fit: the KV cache holds {slots} tokens, so lower it or give more."
            )
        return wanted
