"""The limits and policies of a scheduler."""

from __future__ import annotations

import collections.abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from vllm_teach.engine.failure import shown
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.errors import InvalidArgumentError

_CHOICES = {
    "policy": ("fcfs", "priority"),
    "batching": ("continuous", "static", "prefill_first"),
    "preemption": ("recompute", "swap", "auto"),
}


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
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("long_prefill_token_threshold", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
                _refuse(name, value, f"use a whole number from {low}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            hint = "every running sequence takes a token a step, so use at least max_num_seqs, which is"
            _refuse("max_num_batched_tokens", self.max_num_batched_tokens, f"{hint} {self.max_num_seqs}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), f"use {' or '.join(map(repr, choices))}")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            hint = "without enable_chunked_prefill prompts are computed whole, so leave it 0"
            _refuse("long_prefill_token_threshold", self.long_prefill_token_threshold, hint)
        if not _is_real(self.watermark) or not 0 <= self.watermark < 1:
            _refuse("watermark", self.watermark, "use a number from 0 and below 1")
        target = self.target_inter_token_latency
        if target is not None and not (_is_real(target) and 0 < target < math.inf):
            _refuse("target_inter_token_latency", target, "use a number of seconds above 0, or None")


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refuse(name: str, value: Any, hint: str) -> None:
    raise InvalidArgumentError(f"{name}={shown(value)} is not valid: {hint}.")
