"""What an INT8 KV cache changes in a model's predictions: the same texts, token by token, with both caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_teach.attention.shapes import check_count
from vllm_teach.engine.limits import kv_bytes_per_token
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.sliding_window import Perplexity


@dataclass(frozen=True, eq=False)
class CachePredictions:
    """What a model says of texts when its keys and values come from one kind of cache, `kv_cache_dtype`.

    `scores` has each token of the texts but their first, given those before it; `choices`, int64 `[tokens]`, is the
    token that was most likely there. `bytes_per_token` is what K and V of one token take over all layers.
    """

    kv_cache_dtype: str
    scores: Perplexity
    choices: Tensor
    bytes_per_token: int


@dataclass(frozen=True, eq=False)
class KVCacheComparison:
    """The predictions with K and V in the model's dtype (`exact`), and with INT8 (`quantized`), for the same tokens."""

    exact: CachePredictions
    quantized: CachePredictions

    @property
    def agreement(self) -> float:
        """The share of tokens before which both hold the same token for the most likely: teacher-forced agreement."""
        return float((self.exact.choices == self.quantized.choices).double().mean())

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity with INT8 / that without; 1 is no loss."""
        return self.quantized.scores.perplexity / self.exact.scores.perplexity

    @property
    def bytes_ratio(self) -> float:
        """The bytes of a token with INT8, scales included / those without."""
        return self.quantized.bytes_per_token / self.exact.bytes_per_token


def compare_kv_caches(
    llm: LLM, texts: Sequence[Sequence[int]], *, block_size: int = 16, progress: bool = False
) -> KVCacheComparison:
    """Return what `llm`'s model says of the token ids `texts`, each read from its beginning, with both caches.

    Each kind runs in an engine of its own with `llm`'s attention backend and pattern, so `llm` itself is left alone.
    Raises InvalidArgumentError for no text, for one that has less than two tokens or not fewer than the context, and
    for a `block_size` below 1.
    """
    check_count("block_size", block_size, 1)
    most = llm.model.config.max_position - 1
    lengths = [len(text) for text in texts]
    if not lengths or not 2 <= min(lengths) <= max(lengths) <= most:
        of = f", of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
        raise InvalidArgumentError(
            f"texts has {len(lengths)} texts{of}: give at least one, each of 2 to {most} tokens."
        )
    exact, quantized = (_predict(llm, texts, max(lengths), block_size, kind, progress) for kind in ("auto", "int8"))
    return KVCacheComparison(exact, quantized)


def _predict(
    llm: LLM, texts: Sequence[Sequence[int]], longest: int, block_size: int, kv_cache_dtype: str, progress: bool
) -> CachePredictions:
    scratch = LLM.from_loaded(
        llm.model,
        llm.tokenizer,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        num_kv_blocks=-(-(longest + 1) // block_size),
        max_num_seqs=1,
        attention_backend=llm.engine.config.attention_backend,
        attention_pattern=llm.engine.config.attention_pattern,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = scratch.generate([list(text) for text in texts], params, use_tqdm=progress)
    nlls, choices = [], []
    for output in outputs:
        assert output.prompt_logprobs is not None  # they were asked for
        for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if entries is not None:  # all but the first token
                nlls.append(-entries[token].logprob)
                choices.append(min(entries, key=lambda each: entries[each].rank))
    return CachePredictions(
        kv_cache_dtype,
        Perplexity(torch.tensor(nlls, dtype=torch.float64)),
        torch.tensor(choices),
        kv_bytes_per_token(scratch.engine.config, llm.model.config, llm.model.dtype),
    )
