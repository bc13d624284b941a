"""Measures the cost model of preemption="auto" on this machine: what recomputing takes, and what swapping takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from vllm_teach.engine.limits import kv_bytes_per_token
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.performance.timing import check_calls, time_median

if TYPE_CHECKING:
    from tqdm import tqdm


def measure_preemption_costs(
    llm: LLM, *, longest: int = 1024, repeats: int = 3, progress: bool = True
) -> PreemptionCosts:
    """Time prompts of `longest`, half and a quarter as many tokens, and swapping as many; medians of `repeats` runs.

    They run in an engine of their own on `llm`'s model, with a KV cache for one prompt, so `llm` itself is left alone.
    Swapping is measured into memory, whatever `swap_file` is. Give the result to an engine as `preemption_costs`.

    Raises InvalidArgumentError for `repeats` below 1 and for prompts of which the shortest has no token or the longest
    exceeds the model's context, and EngineError when the times say nothing, as on a machine that is too busy.
    """
    from tqdm import tqdm

    check_calls("repeats", repeats, 1, "measures nothing")
    most = llm.model.config.max_position - 1
    if not 4 <= longest <= most:
        raise InvalidArgumentError(f"longest={longest} is not valid: use a prompt of 4 to {most} tokens.")
    scratch = _engine_for_one(llm, longest)
    lengths = (longest // 4, longest // 2, longest)
    with tqdm(total=(len(lengths) + 1) * (repeats + 1), desc="preemption costs", disable=not progress) as bar:
        seconds = [_prefill_seconds(scratch, length, repeats, bar) for length in lengths]
        speed = _swap_speed(scratch, repeats, bar)
    per_token, per_pair = fit_prefill(lengths, seconds)
    return PreemptionCosts(per_token, per_pair, _kv_bytes_per_token(llm), speed)


def fit_prefill(lengths: tuple[int, int, int], seconds: list[float]) -> tuple[float, float]:
    """Return (seconds per token, seconds per pair) of `constant + n · token + n² / 2 · pair` through three times.

    The constant, above all reading the weights, is left out: a recomputation shares its step with others. Pairs may
    cost nothing, but not less: then the line is that through the ends. Raises EngineError where tokens cost nothing.
    """
    (a, b, c), (at_a, at_b, at_c) = lengths, seconds
    first, second = (at_b - at_a) / (b - a), (at_c - at_b) / (c - b)  # token + pair · the mean length
    per_pair = max(0.0, 2 * (second - first) / (c - a))
    per_token = (at_c - at_a) / (c - a) - per_pair * (a + c) / 2
    if per_token <= 0:
        raise EngineError(
            f"prompts of {a}, {b} and {c} tokens took {at_a:.3g}, {at_b:.3g} and {at_c:.3g} s, which says nothing of a "
            "token's cost: measure again with longer prompts or more repeats."
        )
    return per_token, per_pair


def _engine_for_one(llm: LLM, longest: int) -> LLM:
    """Return an engine with room, in the cache and on the host, for a prompt of `longest` tokens and one more."""
    config = llm.engine.config
    blocks = -(-(longest + 1) // config.block_size)
    return LLM.from_loaded(
        llm.model,
        llm.tokenizer,
        max_num_seqs=1,
        max_num_batched_tokens=config.max_num_batched_tokens,
        attention_backend=config.attention_backend,
        attention_pattern=config.attention_pattern,
        block_size=config.block_size,
        num_kv_blocks=blocks,
        kv_cache_dtype=config.kv_cache_dtype,
        swap_space=blocks * config.block_size * _kv_bytes_per_token(llm) / 2**30,
        enable_prefix_caching=False,  # every prompt is computed
    )


def _prefill_seconds(scratch: LLM, length: int, repeats: int, bar: tqdm) -> float:
    source = random.Random(length)
    prompt = [source.randrange(scratch.model.config.vocab_size) for _ in range(length)]
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def run() -> None:
        scratch.generate(prompt, params, use_tqdm=False)
        bar.update()

    bar.set_postfix_str(f"{length} tokens computed")
    return time_median(run, repeats, device=scratch.model.device).median


def _swap_speed(scratch: LLM, repeats: int, bar: tqdm) -> float:
    """Return the bytes a second, there or back, of moving all blocks to the host and back, in no order."""
    engine = scratch.engine
    blocks = list(range(engine.kv.num_blocks))
    random.Random(0).shuffle(blocks)
    out = Transfer("swap_out", tuple((block, host) for host, block in enumerate(blocks)))
    back = Transfer("swap_in", tuple((host, block) for block, host in out.pairs))

    def run() -> None:
        engine.runner.storage.apply((out, back))
        bar.update()

    bar.set_postfix_str("swapped out and in")
    seconds = time_median(run, repeats, device=scratch.model.device).median
    return 2 * len(blocks) * engine.kv.block_size * _kv_bytes_per_token(scratch) / seconds


def _kv_bytes_per_token(llm: LLM) -> int:
    return kv_bytes_per_token(llm.engine.config, llm.model.config, llm.model.dtype)
