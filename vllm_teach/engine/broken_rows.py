"""NaN and infinity in what the model computed: whose they are, and the error that ends those sequences."""

from __future__ import annotations

from torch import Tensor

from vllm_teach.engine.logits import finite_rows
from vllm_teach.engine.plan import Plan, ScheduledSequence, StepResult
from vllm_teach.errors import EngineError


def broken(what: str) -> EngineError:
    """Return the error of a request for which `what` of the model ("logits", say) are no numbers."""
    return EngineError(
        f"the model's {what} hold NaN or infinite values for this request: check the weights and the dtype."
    )


def fail_item(item: ScheduledSequence, error: EngineError, result: StepResult) -> None:
    """Make `error` the result of `item` and of the forks that would branch off it."""
    for sequence in (item.sequence, *item.sequence.forks):
        result.tokens.pop(sequence.seq_id, None)
        result.errors[sequence.seq_id] = error
    result.prompt_logprobs.pop(item.sequence.seq_id, None)


def fail_broken_rows(hidden: Tensor, plan: Plan, result: StepResult) -> None:
    """Fail each item of `plan` that has a row without finite values in the last hidden states `[tokens, hidden_size]`.

    Of all its tokens, not only of the one that predicts the next: what came of a prompt's first chunk would lie in the
    prefix cache, for everyone whose prompt begins alike.
    """
    finite = finite_rows(hidden)
    if all(finite):
        return
    begin = 0  # row of the item's first token
    for item in plan.items:
        if not all(finite[begin : begin + item.num_tokens]):
            fail_item(item, broken("hidden states"), result)
        begin += item.num_tokens
