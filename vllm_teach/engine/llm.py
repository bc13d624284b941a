"""`LLM`: a model, its tokenizer and an engine behind one object, for offline use. vLLM's names and rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_teach.attention.patterns import Pattern
from vllm_teach.engine.beam_params import BeamSearchOutput, BeamSearchParams
from vllm_teach.engine.beam_search import search_beams
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.device import choose_device, choose_dtype
from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import check_number, check_whole, refuse
from vllm_teach.engine.limits import check_limits, check_quantization
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.offline import progress_bar, run_all
from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.prompts import Conversation, Prompt, list_conversations, list_prompts, render_chat
from vllm_teach.engine.ranks import Ranks, excused, load_over_ranks
from vllm_teach.engine.request import Request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.tokenizer_protocol import EngineTokenizer
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.language_model import LanguageModel
from vllm_teach.models.load import load_config, load_model, read_shard
from vllm_teach.models.resolve import resolve_model
from vllm_teach.models.tokenizer import load_tokenizer
from vllm_teach.quantization.quantization_config import read_config


class LLM:
    """Loads a model and generates text with it.

    `model` is the alias "smollm2" or "tiny", a Hugging Face directory, a .gguf file or a hub id. `dtype` and `device`
    "auto" choose as `engine.device` says. Weights that are quantised in the model's files stay so, and `dtype` is what
    is computed in; `quantization`, "awq", "gptq", "rtn" or "int8", must be what the files say, which None takes (it
    quantises nothing: `vllm-teach quantize` does). `enforce_eager` must be True: the engine captures no graphs. All
    others are the fields of `EngineConfig`, which says what they do; names are vLLM's where it has them. All are
    checked before the weights are loaded; InvalidArgumentError names the bad one.

    With `tensor_parallel_size` above 1 that many processes, ranks, compute the model together, each with its part of
    the weights and of the KV cache: this one and the workers that it starts, which end with it, with `close`, or when
    the LLM is garbage; under `torchrun`, the ranks that it started, of which rank 0 goes on and the others serve it
    until it is done. The cache's sizes, also `swap_space`, are each rank's own (a `swap_file` gets others beside it,
    `.rank1` behind their names, and so on). When a rank dies, or is silent for `distributed_timeout_seconds` in the
    midst of a step, EngineDeadError is raised.

    With `hf=True` transformers loads and computes the model, which must not be quantised, and only its attention is
    ours: for architectures that `models.decoder` does not know. What such a model is can only be seen once it is
    loaded, so its limits are checked then.

    Attributes: `engine`, `model`, `tokenizer`, and `name`, the `model` that was asked for.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        distributed_timeout_seconds: float = 60.0,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        seed: int = 0,
        enforce_eager: bool = True,
        attention_backend: str = "auto",
        attention_pattern: Pattern | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        swap_space: float = 0,
        swap_file: str | Path | None = None,
        kv_cache_dtype: str = "auto",
        kv_placement: str = "scattered",
        enable_prefix_caching: bool = True,
        prefix_cache: str = "hash",
        eviction_policy: str = "lru",
        scheduling_policy: str = "fcfs",
        batching: str = "continuous",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.01,
        preemption_mode: str = "recompute",
        preemption_costs: PreemptionCosts | None = None,
        target_inter_token_latency: float | None = None,
        max_events: int | None = 200_000,
        hf: bool = False,
    ) -> None:
        if enforce_eager is not True:
            raise InvalidArgumentError(f"enforce_eager={shown(enforce_eager)} is not supported: leave it True.")
        config = EngineConfig(
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            attention_backend=attention_backend,
            attention_pattern=attention_pattern,
            seed=seed,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            swap_space=swap_space,
            swap_file=swap_file,
            kv_cache_dtype=kv_cache_dtype,
            kv_placement=kv_placement,
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache=prefix_cache,
            eviction_policy=eviction_policy,
            scheduling_policy=scheduling_policy,
            batching=batching,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            watermark=watermark,
            preemption_mode=preemption_mode,
            preemption_costs=preemption_costs,
            target_inter_token_latency=target_inter_token_latency,
            max_events=max_events,
        )
        check_whole("tensor_parallel_size", tensor_parallel_size, 1)
        hint = "use a number of seconds above 0 and at most 86400"
        check_number("distributed_timeout_seconds", distributed_timeout_seconds, 0, 86400, open_low=True, hint=hint)
        if hf and tensor_parallel_size > 1:
            refuse("tensor_parallel_size", tensor_parallel_size, "transformers' models are not split, so use 1")
        self.name = str(model)
        with excused(tensor_parallel_size):
            chosen_device = choose_device(device)
            chosen_dtype = choose_dtype(dtype, chosen_device)
            path = resolve_model(model)
            stored = read_config(path)
            check_quantization(quantization, stored, model)
        self.model: LanguageModel
        ranks: Ranks | None = None
        if hf:
            if stored is not None:
                raise InvalidArgumentError(
                    f"hf={hf!r} does not fit model={shown(str(model))}, whose weights are quantised by "
                    f"{stored.method!r}: leave hf out, or use the unquantised model."
                )
            from vllm_teach.models.hugging_face import load_hugging_face  # all of transformers comes with it

            self.model = load_hugging_face(path, chosen_dtype, chosen_device)
        else:
            shape = load_config(path) if tensor_parallel_size == 1 else read_shard(path, 0, tensor_parallel_size).config
            check_limits(config, shape, chosen_dtype, chosen_device)
            if tensor_parallel_size == 1:
                self.model = load_model(path, chosen_dtype, chosen_device)
            else:
                how = (chosen_dtype, chosen_device, config, float(distributed_timeout_seconds))
                self.model, ranks = load_over_ranks(path, int(tensor_parallel_size), *how)
        try:
            self.tokenizer: EngineTokenizer = load_tokenizer(path)
            self.engine = LLMEngine(self.model, self.tokenizer, config, ranks)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise

    def close(self) -> None:
        """End the processes that compute with this one (`tensor_parallel_size`); after that it computes no more.

        Without them it does nothing. Can be called twice.
        """
        if self.engine.ranks is not None:
            self.engine.ranks.close()

    @classmethod
    def from_loaded(cls, model: LanguageModel, tokenizer: EngineTokenizer, **limits: Any) -> LLM:
        """Return an LLM around a model and a tokenizer that are in memory already; its `name` is the model's class.

        `limits` are the fields of `EngineConfig`, which are `LLM`'s keyword arguments of the same names.
        """
        llm = cls.__new__(cls)
        llm.name, llm.model, llm.tokenizer = type(model).__name__, model, tokenizer
        llm.engine = LLMEngine(model, tokenizer, EngineConfig(**limits))
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Return one finished output per prompt, in the prompts' order.

        A prompt is a text, a list of token ids or a dict {"prompt": text} or {"prompt_token_ids": ids}; a single one
        may stand alone. Only prompts with the same "cache_salt" in their dicts share computed prefixes.
        `sampling_params` is one for all (None: the defaults) or one for each. `priority` has a number for each, the
        smallest first, for `scheduling_policy="priority"`.

        All prompts are checked before any runs. With `on_error="raise"` the first bad prompt raises
        InvalidArgumentError, PromptTooLongError or EngineError (the tokenizer failed) with its index and nothing runs,
        and a request that fails while running raises its EngineError after the others were aborted; with "return" such
        a request's output has `error` set and the others run to their end. An interrupt aborts all and frees their
        cache.
        """
        items = list_prompts(prompts)
        return run_all(
            self.engine,
            "prompts",
            items,
            sampling_params=sampling_params,
            priority=priority,
            use_tqdm=use_tqdm,
            on_error=on_error,
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Return the model's answer to a conversation, or to each of several, as `generate` does.

        A conversation is a list of messages with `role` and `content`, both strings. One that is malformed, or that the
        model's chat template refuses, is treated as `generate` treats a bad prompt.
        """
        conversations = list_conversations(messages)
        return run_all(
            self.engine,
            "messages",
            conversations,
            render=self.chat_prompt,
            sampling_params=sampling_params,
            use_tqdm=use_tqdm,
            on_error=on_error,
        )

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Return, for each prompt, the `params.beam_width` best texts that beam search finds, the best first.

        Beams share the blocks of what they have in common and copy on write. Raises what `search_beams` raises, and
        EngineError while requests are in the engine.
        """
        chosen = list_prompts(prompts)
        with progress_bar(len(chosen), "prompts", use_tqdm) as bar:
            return search_beams(self.engine, chosen, params, lambda search: bar.update(search.num_finished - bar.n))

    def chat_prompt(self, messages: Conversation) -> Prompt:
        """Return the prompt of one conversation, for `stream` or `generate`, the assistant's turn opened.

        Raises InvalidArgumentError for what is no conversation or what the model's chat template refuses.
        """
        return render_chat(messages, self.tokenizer)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Return an iterator over pieces of text as they become certain; joined they are `generate`'s text.

        Raises at once what `generate` raises for the prompt, and InvalidArgumentError for n > 1. Closing the iterator
        early aborts the request.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        checked = self.engine.validate(prompt, params)
        if params.n > 1:
            raise InvalidArgumentError(f"n={params.n} is not valid: a stream has one completion, so use n=1.")
        return self._pieces(checked, params.copy())

    def _pieces(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        request: Request | None = None
        shown = 0
        try:
            with self.engine.exclusive.hold():  # a Ctrl-C comes when `request` is known
                request = self.engine.get_request(self.engine.add_request(prompt, params))
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
            if request is not None:
                self.engine.abort(request)
