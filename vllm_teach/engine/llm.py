"""`LLM`: a model, its tokenizer and an engine behind one object, for offline use. vLLM's names and rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from vllm_teach import backends
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.device import choose_device, choose_dtype, kv_cache_budget
from vllm_teach.engine.llm_engine import LLMEngine, Prompt
from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.request import Request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.text import EngineTokenizer
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.models.tokenizer import load_tokenizer

Message = dict[str, str]


class LLM:
    """Loads a model and generates text with it.

    `model` is the alias "smollm2", a Hugging Face directory, a .gguf file or a hub id. `dtype` and `device` "auto"
    choose as `engine.device` says. `max_model_len` None is the model's context, or what the KV cache holds if that is
    less. The KV cache gets `kv_cache_memory_bytes`; where that is None, `gpu_memory_utilization` of the free memory of
    a GPU, or a quarter of the available memory of a CPU-only machine, and never more than `max_num_seqs` sequences of
    `max_model_len` tokens need. `seed` drives the requests that have none of their own. `enforce_eager` must be True:
    the engine captures no graphs.

    Attributes: `engine`, `model`, `tokenizer`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        seed: int = 0,
        enforce_eager: bool = True,
        attention_backend: str = "sdpa",
    ) -> None:
        if enforce_eager is not True:
            raise InvalidArgumentError(f"enforce_eager={enforce_eager!r} is not supported: leave it True.")
        chosen_device = choose_device(device)
        chosen_dtype = choose_dtype(dtype, chosen_device)
        path = resolve_model(model)
        self._start(
            load_model(path, chosen_dtype, chosen_device),
            load_tokenizer(path),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            seed=seed,
            attention_backend=attention_backend,
        )

    @classmethod
    def from_loaded(cls, model: Decoder, tokenizer: EngineTokenizer, **limits: Any) -> LLM:
        """Return an LLM around a model and a tokenizer that are in memory already.

        `limits` are `LLM`'s keyword arguments from `max_model_len` on, with the same defaults (no `enforce_eager`).
        """
        llm = cls.__new__(cls)
        llm._start(model, tokenizer, **limits)
        return llm

    def _start(
        self,
        model: Decoder,
        tokenizer: EngineTokenizer,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        seed: int = 0,
        attention_backend: str = "sdpa",
    ) -> None:
        _check_whole("max_num_seqs", max_num_seqs)
        _check_whole("max_num_batched_tokens", max_num_batched_tokens)
        if isinstance(gpu_memory_utilization, bool) or not 0 < gpu_memory_utilization <= 1:
            raise InvalidArgumentError(
                f"gpu_memory_utilization={gpu_memory_utilization!r} is not valid: use a number above 0 and at most 1."
            )
        _check_backend(attention_backend, model)
        if kv_cache_memory_bytes is None:
            most = max_num_seqs * (max_model_len or model.config.max_position)
            needed = most * model.config.kv_bytes_per_token(model.dtype.itemsize)
            kv_cache_memory_bytes = min(needed, kv_cache_budget(model.device, gpu_memory_utilization))
        else:
            _check_whole("kv_cache_memory_bytes", kv_cache_memory_bytes)
        config = EngineConfig(
            kv_cache_bytes=kv_cache_memory_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            attention_backend=attention_backend,
            seed=seed,
        )
        self.model, self.tokenizer = model, tokenizer
        self.engine = LLMEngine(model, tokenizer, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Return one finished output per prompt, in the prompts' order.

        A prompt is a text or a list of token ids; a single one may stand alone. `sampling_params` is one for all (None:
        the defaults) or one for each. All prompts are checked before any runs. With `on_error="raise"` the first bad
        prompt raises InvalidArgumentError or PromptTooLongError with its index and nothing runs, and a request that
        fails while running raises its EngineError after the others were aborted; with "return" such a request's
        output has `error` set and the others run to their end. An interrupt aborts all and frees their cache.
        """
        if on_error not in ("raise", "return"):
            raise InvalidArgumentError(f"on_error={on_error!r} is not valid: use 'raise' or 'return'.")
        items = _as_list(prompts)
        params = _one_each(sampling_params, len(items))
        outputs: dict[int, RequestOutput] = {}
        for index, (prompt, each) in enumerate(zip(items, params, strict=True)):
            try:
                self.engine.validate(prompt, each)
            except InvalidArgumentError as error:
                named = type(error)(f"prompts[{index}]: {error}")
                if on_error == "raise":
                    raise named from error
                text = prompt if isinstance(prompt, str) else None
                outputs[index] = RequestOutput(f"prompts[{index}]", text, [], finished=True, error=named)
        runnable = [index for index in range(len(items)) if index not in outputs]
        requests = self._run([(items[index], params[index]) for index in runnable], use_tqdm, on_error)
        outputs.update(zip(runnable, (request.output() for request in requests), strict=True))
        return [outputs[index] for index in range(len(items))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Return the model's answer to a conversation, or to each of several, as `generate` does.

        A conversation is a list of messages with `role` and `content`. Raises InvalidArgumentError for one that the
        model's chat template refuses.
        """
        many = bool(messages) and isinstance(messages[0], list)
        conversations = messages if many else [messages]
        return self.generate(
            [self._chat_tokens(conversation) for conversation in conversations],
            sampling_params,
            use_tqdm=use_tqdm,
            on_error=on_error,
        )

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Return an iterator over pieces of text as they become certain; joined they are `generate`'s text.

        Raises at once what `generate` raises for the prompt, and InvalidArgumentError for n > 1. Closing the iterator
        early aborts the request.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        self.engine.validate(prompt, params)
        if params.n > 1:
            raise InvalidArgumentError(f"n={params.n} is not valid: a stream has one completion, so use n=1.")
        return self._pieces(prompt, params)

    def _pieces(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        request = self.engine.get_request(self.engine.add_request(prompt, params))
        shown = 0
        try:
            while True:
                # Asked before the text is read: others may step the engine while this waits in `yield`.
                finished, text = request.finished, request.sequences[0].text
                if len(text) > shown:
                    piece, shown = text[shown:], len(text)
                    yield piece
                if finished:
                    break
                self.engine.step()
            if request.error is not None:
                raise request.error
        finally:
            self.engine.abort(request.request_id)

    def _run(self, work: list[tuple[Prompt, SamplingParams]], use_tqdm: bool, on_error: str) -> list[Request]:
        """Add the requests and step until they ended; whatever interrupts that, none of them stays in the engine."""
        requests: list[Request] = []
        try:
            for prompt, params in work:
                requests.append(self.engine.get_request(self.engine.add_request(prompt, params)))
            # Saying disable=False would overrule the environment's TQDM_DISABLE.
            quiet: dict[str, Any] = {} if use_tqdm else {"disable": True}
            with tqdm(total=len(requests), desc="requests", **quiet) as bar:
                while not all(request.finished for request in requests):
                    self.engine.step()
                    newly = sum(request.finished for request in requests) - bar.n
                    if newly:
                        bar.update(newly)
                    failed = next((each.error for each in requests if each.error is not None), None)
                    if failed is not None and on_error == "raise":
                        raise failed
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
        return requests

    def _chat_tokens(self, conversation: object) -> list[int]:
        if not isinstance(conversation, list) or not conversation or not all(isinstance(m, dict) for m in conversation):
            raise InvalidArgumentError(
                f"messages={conversation!r} is not valid: use a list of dicts with 'role' and 'content', at least one."
            )
        return self.tokenizer.apply_chat_template(conversation)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; a text, or a list that holds only whole numbers, is a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidArgumentError(
            f"prompts is of type {type(prompts).__name__}, which is not valid: use a text, token ids or a list of them."
        )
    if prompts and all(isinstance(each, int) for each in prompts):
        return [[each for each in prompts if isinstance(each, int)]]
    return list(prompts)


def _one_each(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if not isinstance(sampling_params, list | tuple):
        raise InvalidArgumentError(
            f"sampling_params is of type {type(sampling_params).__name__}, which is not valid: use SamplingParams."
        )
    if len(sampling_params) != count:
        raise InvalidArgumentError(
            f"sampling_params has {len(sampling_params)} entries for {count} prompts: give one, or one for each."
        )
    return list(sampling_params)


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={value!r} is not valid: use a whole number from 1.")


def _check_backend(name: str, model: Decoder) -> None:
    """Raise InvalidArgumentError unless the backend exists and serves this model on this machine."""
    backend = backends.get(name)
    spec = AttentionSpec(
        q_len=1,
        kv_len=16,
        batch=1,
        q_heads=model.config.num_q_heads,
        kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
        device=model.device.type,
        causal=True,
    )
    reason = backend.unavailable() or backend.supports(spec)
    if reason is not None:
        raise InvalidArgumentError(f"attention_backend={name!r} is not usable here ({reason}): use 'sdpa'.")
