"""What the model thought of the prompt's own tokens: the log-probability of each, given those before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm_teach.engine.broken_rows import broken, fail_item
from vllm_teach.engine.logits import finite_rows, rank_tokens
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.engine.request import TopLogprobs
from vllm_teach.models.language_model import LanguageModel

# Of one batch of logits; while they are ranked, some three times as much is in use.
_LOGITS_BYTES = 32 << 20


def rank_prompt_tokens(model: LanguageModel, hidden: Tensor, plan: Plan, result: StepResult) -> None:
    """Fill `result.prompt_logprobs` from the last hidden states of the tokens of `plan`, `[tokens, hidden_size]`.

    The token at position p predicts the one at p + 1, so the prompt's last token predicts none of the prompt, and
    nothing predicts its first. Logits that are no numbers become the error of their sequence.
    """
    begin = 0  # row of the item's first token
    for item in plan.items:
        wanted, prompt = item.sequence.params.prompt_logprobs, item.sequence.prompt_token_ids
        count = min(item.num_tokens, len(prompt) - 1 - item.start)
        if wanted is not None and count > 0:
            next_tokens = prompt[item.start + 1 : item.start + 1 + count]
            ranked = _rank(model, hidden[begin : begin + count], next_tokens, wanted)
            if ranked is None:
                fail_item(item, broken("logits"), result)
            else:
                result.prompt_logprobs[item.sequence.seq_id] = ranked
        begin += item.num_tokens


def _rank(model: LanguageModel, hidden: Tensor, tokens: Sequence[int], wanted: int) -> list[TopLogprobs] | None:
    """Rank each of `tokens` by the logits of its row; None where they are no numbers.

    Some rows at a time: logits are a thousand times as large as token ids.
    """
    at_once = max(1, _LOGITS_BYTES // (4 * model.config.vocab_size))
    found: list[TopLogprobs] = []
    for first in range(0, len(tokens), at_once):
        some = tokens[first : first + at_once]
        logits = model.logits(hidden[first : first + at_once]).float()
        if not all(finite_rows(logits)):
            return None
        found += rank_tokens(logits, some, [wanted] * len(some))
    return found
