"""The limits and policies of a scheduler."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import (
    check_choice,
    check_flag,
    check_number,
    check_whole,
    refuse,
    take_plain_numbers,
)
from vllm_teach.engine.preemption import PreemptionCosts

POLICIES = ("fcfs", "priority")
BATCHINGS = ("continuous", "static", "prefill_first")
PREEMPTIONS = ("recompute", "swap", "auto")


@dataclass(frozen=True)
class SchedulerConfig:
    """Each field is checked on construction: InvalidArgumentError names the bad one.

    - `max_num_seqs`: sequences that run at once. `max_num_batched_tokens`: tokens of a step, at least as many.
    - `policy`: who is served first and preempted last. "fcfs": by arrival; "priority": the lower number, then arrival.
    - `batching`: "continuous" mixes prefill and decode and refills a place at once. For comparison: "static" admits a
      batch when the last one has ended, so that all its places wait for the longest; "prefill_first" (vLLM v0) makes a
      step of prefills only while there are any, else of decodes.
    - `enable_chunked_prefill`: a prompt may be computed over several steps, with what the decodes leave of the budget,
      and of at most `long_prefill_token_threshold` tokens a step if that is not 0. If off, prompts are computed whole,
      and the first of a step may exceed the budget.
    - `watermark`: share of the blocks that admitting a sequence leaves free, so that it is not preempted at once.
    - `preemption`: how a sequence gives its blocks up. "recompute": they are freed; "swap": they are copied to the
      host, or freed if it has no room; "auto": whichever `costs` says is cheaper.
    - `target_inter_token_latency`: seconds that a step with decodes should take at most; the scheduler then adapts the
      token budget to what it is told by `observe`. None: the budget is `max_num_batched_tokens`.
    - `unseen`: number of computed tokens -> the logical blocks that no later query sees (a window); they are given
      back. What fits is still judged by the whole length, which is on the safe side.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    batching: str = "continuous"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    preemption: str = "recompute"
    target_inter_token_latency: float | None = None
    unseen: Callable[[int], collections.abc.Sequence[int]] | None = None
    costs: PreemptionCosts = field(default_factory=PreemptionCosts)

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_step_limits(self)
        check_choice("policy", self.policy, POLICIES)
        check_choice("preemption", self.preemption, PREEMPTIONS)


def check_step_limits(config: Any) -> None:
    """Raise InvalidArgumentError for a bad one of the fields that a SchedulerConfig and an EngineConfig both have."""
    check_batch_limits(config.max_num_seqs, config.max_num_batched_tokens)
    check_choice("batching", config.batching, BATCHINGS)
    check_flag("enable_chunked_prefill", config.enable_chunked_prefill)
    check_whole("long_prefill_token_threshold", config.long_prefill_token_threshold, 0)
    if config.long_prefill_token_threshold and not config.enable_chunked_prefill:
        hint = "without enable_chunked_prefill prompts are computed whole, so leave it 0"
        refuse("long_prefill_token_threshold", config.long_prefill_token_threshold, hint)
    check_number("watermark", config.watermark, 0, 1, open_high=True, hint="use a number from 0 and below 1")
    if config.target_inter_token_latency is not None:
        hint = "use a number of seconds above 0, or None"
        check_number("target_inter_token_latency", config.target_inter_token_latency, 0, open_low=True, hint=hint)


def check_batch_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise InvalidArgumentError unless a step has room for a token of every running sequence."""
    check_whole("max_num_seqs", max_num_seqs, 1)
    check_whole("max_num_batched_tokens", max_num_batched_tokens, 1)
    if max_num_batched_tokens < max_num_seqs:
        least = shown(max_num_seqs)
        hint = f"every running sequence takes a token a step, so use at least max_num_seqs, which is {least}"
        refuse("max_num_batched_tokens", max_num_batched_tokens, hint)
