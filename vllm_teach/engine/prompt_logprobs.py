"""What the model thought of the prompt's own tokens: the log-probability of each, given those before it."""

from __future__ import annotations

from torch import Tensor

from vllm_teach.engine.logits import rank_tokens
from vllm_teach.engine.plan import Plan
from vllm_teach.engine.request import TopLogprobs
from vllm_teach.models.language_model import LanguageModel

# Of one batch of logits; while they are ranked, some three times as much is in use.
_LOGITS_BYTES = 32 << 20


def rank_prompt_tokens(model: LanguageModel, hidden: Tensor, plan: Plan) -> dict[int, list[TopLogprobs]]:
    """Return `StepResult.prompt_logprobs` of `plan`, from the last hidden states of its tokens `[tokens, hidden_size]`.

    The token at position p predicts the one at p + 1, so the prompt's last token predicts none of the prompt, and
    nothing predicts its first. Some rows at a time: logits are a thousand times as large as token ids.
    """
    at_once = max(1, _LOGITS_BYTES // (4 * model.config.vocab_size))
    found: dict[int, list[TopLogprobs]] = {}
    begin = 0  # row of the item's first token
    for item in plan.items:
        wanted, prompt = item.sequence.params.prompt_logprobs, item.sequence.prompt_token_ids
        count = min(item.num_tokens, len(prompt) - 1 - item.start)
        if wanted is not None and count > 0:
            next_tokens = prompt[item.start + 1 : item.start + 1 + count]
            found[item.sequence.seq_id] = [
                ranked
                for first in range(0, count, at_once)
                for ranked in rank_tokens(
                    model.logits(hidden[begin + first : begin + min(first + at_once, count)]).float(),
                    next_tokens[first : first + at_once],
                    [wanted] * min(at_once, count - first),
                )
            ]
        begin += item.num_tokens
    return found
