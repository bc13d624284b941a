"""What a preempted sequence costs: computed again, or swapped to the host and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vllm_teach.engine.field_checks import check_number, take_plain_numbers


@dataclass(frozen=True)
class PreemptionCosts:
    """The cost model of preemption="auto", in seconds; `measure_preemption_costs` measures its constants on a machine.

    Recomputing n tokens takes n · `prefill_seconds_per_token` + n² / 2 · `attention_seconds_per_pair` (each token
    attends to those before it). Swapping moves them twice, out and in: 2 · n · `kv_bytes_per_token` /
    `swap_bytes_per_second`. What the model leaves out: a prefix cache may still have the first blocks when the sequence
    comes back, which makes recomputing cheaper; the last block is swapped whole; and a recomputation shares its step
    with others, a swap holds the step up. Kwon et al. 2023, section 7.3, measure the same comparison.

    The defaults are not measured: they are of the order of 135 million parameters in float32 on two CPU cores.
    """

    prefill_seconds_per_token: float = 1e-3
    attention_seconds_per_pair: float = 0.0
    kv_bytes_per_token: float = 46_080
    swap_bytes_per_second: float = 4e9

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        for each in fields(self):
            free = each.name == "attention_seconds_per_pair"
            hint = f"use a finite number {'from' if free else 'above'} 0"
            check_number(each.name, getattr(self, each.name), 0, open_low=not free, hint=hint)

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
