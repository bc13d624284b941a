"""What a preempted sequence costs: computed again, or swapped to the host and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real

from vllm_teach.engine.failure import shown
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class PreemptionCosts:
    """The cost model of preemption="auto", in seconds. Modelled, not measured: set the constants to measured ones.

    Recomputing n tokens takes n · `prefill_seconds_per_token` + n² / 2 · `attention_seconds_per_pair` (each token
    attends to those before it). Swapping moves them twice, out and in: 2 · n · `kv_bytes_per_token` /
    `swap_bytes_per_second`. What the model leaves out: a prefix cache may still have the first blocks when the sequence
    comes back, which makes recomputing cheaper; the last block is swapped whole; and a recomputation shares its step
    with others, a swap holds the step up. Kwon et al. 2023, section 7.3, measure the same comparison.

    The defaults are of the order of a model of 135 million parameters in float32 on two CPU cores.
    """

    prefill_seconds_per_token: float = 1e-3
    attention_seconds_per_pair: float = 0.0
    kv_bytes_per_token: float = 46_080
    swap_bytes_per_second: float = 4e9

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low_open = each.name != "attention_seconds_per_pair"
            real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not real or value < 0 or (low_open and value == 0):
                least = "above 0" if low_open else "from 0"
                raise InvalidArgumentError(f"{each.name}={shown(value)} is not valid: use a finite number {least}.")

    def recompute_seconds(self, num_tokens: int) -> float:
        """Return the modelled seconds to compute `num_tokens` tokens of one sequence again."""
        linear = num_tokens * self.prefill_seconds_per_token
        return linear + num_tokens**2 / 2 * self.attention_seconds_per_pair

    def swap_seconds(self, num_tokens: int) -> float:
        """Return the modelled seconds to move `num_tokens` tokens to the host and back."""
        return 2 * num_tokens * self.kv_bytes_per_token / self.swap_bytes_per_second

    def cheaper(self, num_tokens: int) -> str:
        """Return "recompute" or "swap", whichever is modelled to take less time; "recompute" if they are equal."""
        return "swap" if self.swap_seconds(num_tokens) < self.recompute_seconds(num_tokens) else "recompute"

    @property
    def crossover(self) -> float:
        """The number of tokens from which on swapping is cheaper; 0: always, inf: never."""
        gap = 2 * self.kv_bytes_per_token / self.swap_bytes_per_second - self.prefill_seconds_per_token
        if gap < 0:
            return 0.0
        return 2 * gap / self.attention_seconds_per_pair if self.attention_seconds_per_pair else math.inf
