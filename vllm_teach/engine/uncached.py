"""Generation without a KV cache, for comparison: every token recomputes all tokens before it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.decoder import Decoder


@torch.inference_mode()
def generate_without_cache(
    model: Decoder,
    token_ids: list[int],
    max_tokens: int,
    on_step: Callable[[int, float], None] | None = None,
    attention_backend: str = "sdpa",
) -> list[int]:
    """Return `max_tokens` greedy tokens after the prompt `token_ids`; end-of-sequence does not stop it.

    Step i runs the model over the prompt and all i tokens so far: n tokens cost O(n²) token computations, where a cache
    makes it O(n). `on_step(num_tokens_computed, seconds)` is called after each step. Raises InvalidArgumentError for an
    empty prompt.
    """
    if not token_ids:
        raise InvalidArgumentError("token_ids=[] is empty: give at least one token.")
    tokens = list(token_ids)
    for _ in range(max_tokens):
        started = time.perf_counter()
        device = model.device
        ids = torch.tensor(tokens, device=device)
        hidden = model(ids, torch.arange(len(tokens), device=device), full_causal(attention_backend))
        next_id = int(model.logits(hidden[-1:]).argmax())
        if on_step is not None:
            on_step(len(tokens), time.perf_counter() - started)
        tokens.append(next_id)
    return tokens[len(token_ids) :]
