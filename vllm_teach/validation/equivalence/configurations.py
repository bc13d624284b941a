"""The settings of an engine that must not change a token, and the rows of them that are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_teach.kvcache.buddy import next_power_of_two
from vllm_teach.validation.equivalence.covering_array import covering_array
from vllm_teach.validation.equivalence.workload import Asked, longest

# In this order the pairs take 17 rows, and a static batch with 16 tokens a step, which is of few sequences, does not
# meet a small pool, which it would hardly overflow.
FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": ("fcfs", "priority"),
    "memory": ("roomy", "recompute", "swap"),
    "token_budget": (16, 128, 512, 4096),
    "batching": ("continuous", "static", "prefill_first"),
    "block_size": (1, 4, 16, 64),
    "prefix_cache": ("off", "hash", "radix"),
    "completions": (1, 3),
    "placement": ("scattered", "contiguous", "prefer_contiguous"),
}


@dataclass(frozen=True)
class Configuration:
    """One engine. Each field is a factor of `FACTORS`.

    `memory` "roomy" has room for all requests at once. "recompute" and "swap" are a pool in which the longest request
    just fits, and what happens to the sequences that must give way. `completions` is the n of the sampled requests.
    """

    policy: str
    batching: str
    block_size: int
    token_budget: int
    prefix_cache: str
    placement: str
    memory: str
    completions: int

    def __str__(self) -> str:
        """Return the values in the order of the fields, which is that of the table's head."""
        return (
            f"{self.policy:<9}{self.batching:<14}{self.block_size:>5}{self.token_budget:>7}  {self.prefix_cache:<7}"
            f"{self.placement:<18}{self.memory:<10}{self.completions:>2}"
        )

    HEAD = (
        f"{'policy':<9}{'batching':<14}{'block':>5}{'budget':>7}  {'prefix':<7}{'placement':<18}{'memory':<10}{'n':>2}"
    )

    def limits(self, requests: Sequence[Asked], kv_bytes_per_token: int) -> dict[str, Any]:
        """Return what `LLM.from_loaded` takes, with a pool that is roomy or small for these requests.

        At most 64 sequences run at once, and no more than the budget has tokens.
        """
        small = self.memory != "roomy"
        blocks = self._blocks(longest(requests)) if small else 2 * sum(map(self._blocks, _lengths(requests)))
        swap_bytes = sum(_lengths(requests)) * kv_bytes_per_token * 2 if self.memory == "swap" else 0
        return {
            "scheduling_policy": self.policy,
            "batching": self.batching,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.token_budget,
            "max_num_seqs": min(64, self.token_budget),
            "enable_prefix_caching": self.prefix_cache != "off",
            "prefix_cache": "hash" if self.prefix_cache == "off" else self.prefix_cache,
            "kv_placement": self.placement,
            "num_kv_blocks": blocks,
            "preemption_mode": "swap" if self.memory == "swap" else "recompute",
            "swap_space": max(swap_bytes, self.block_size * kv_bytes_per_token * bool(swap_bytes)) / 2**30,
            "watermark": 0.0,
            "max_events": None,
        }

    def _blocks(self, num_tokens: int) -> int:
        """Return the blocks that one sequence of so many tokens needs: contiguous ones lie in a power of two."""
        blocks = -(-num_tokens // self.block_size)
        return next_power_of_two(blocks) if self.placement == "contiguous" else blocks


ROOMY = Configuration("fcfs", "continuous", 16, 2048, "off", "scattered", "roomy", 3)


def list_configurations(strength: int = 2) -> list[Configuration]:
    """Return configurations in which any `strength` factors take all combinations of their values."""
    return [Configuration(**row) for row in covering_array(FACTORS, strength)]


def _lengths(requests: Sequence[Asked]) -> list[int]:
    """Return the final length of each sequence, in tokens."""
    return [request.num_tokens for request in requests for _ in range(request.completions)]
