"""How far an engine's log-probabilities lie from those of the model alone, which computes the whole text at once."""

from __future__ import annotations

import torch

from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import full_causal
from vllm_teach.models.decoder import Decoder


def uncached_error(model: Decoder, output: RequestOutput) -> float:
    """Return the largest difference over all tokens of all completions: no cache, no blocks, no batch on this side.

    Raises InvalidArgumentError for an output without log-probabilities: ask for them with `logprobs=0`.
    """
    worst = 0.0
    for completion in output.outputs:
        if completion.logprobs is None:
            raise InvalidArgumentError("output has no logprobs: ask for them with SamplingParams(logprobs=0).")
        ids = torch.tensor(output.prompt_token_ids + completion.token_ids)
        logits = model.logits(model(ids, torch.arange(len(ids)), full_causal()))  # [tokens, vocab]
        alone = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        for row, token, entries in zip(alone, completion.token_ids, completion.logprobs, strict=True):
            worst = max(worst, abs(entries[token].logprob - float(row[token])))
    return worst
