"""What an engine's steps came to since it was made."""

from __future__ import annotations

from vllm_teach.engine.bucket_counts import BucketCounts
from vllm_teach.engine.config import StepStats
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.errors import OutOfMemoryError

TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECOND_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class StepTotals:
    """Running totals, and how tokens and seconds were distributed over the steps (`tokens`, `seconds`).

    `prefill_tokens` and `decode_tokens` were computed. `prompt_tokens` are those of prompts that were computed to
    their end, whether here or, by a prefix hit, for an earlier request; `generation_tokens` were drawn.
    `out_of_memory` counts the steps that failed for want of memory.
    """

    def __init__(self) -> None:
        self.prefill_tokens = self.decode_tokens = self.prompt_tokens = self.generation_tokens = 0
        self.out_of_memory = 0
        self.tokens, self.seconds = BucketCounts(TOKEN_BOUNDS), BucketCounts(SECOND_BOUNDS)

    def add(self, plan: Plan, result: StepResult, stats: StepStats) -> None:
        """Count a step that has ended. One that only moved blocks, or found nothing to do, had 0 tokens."""
        self.prefill_tokens += stats.num_prefill_tokens
        self.decode_tokens += stats.num_decode_tokens
        self.generation_tokens += len(result.tokens)
        if stats.num_prefill_tokens:
            self.prompt_tokens += _prompts_done(plan, result)
        if result.errors:
            self.out_of_memory += any(isinstance(error, OutOfMemoryError) for error in result.errors.values())
        self.tokens.add(stats.num_prefill_tokens + stats.num_decode_tokens)
        self.seconds.add(stats.seconds)


def _prompts_done(plan: Plan, result: StepResult) -> int:
    """Return the tokens of the prompts whose last token was in `plan`, so that their first answer was drawn."""
    return sum(
        item.context_len
        for item in plan.items
        if item.context_len == len(item.sequence.prompt_token_ids) and item.sequence.seq_id in result.tokens
    )
