"""A decoder as the two functions that measures of a model ask for: hidden states of a text, and logits of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_teach.models.attend import Attend, full_causal
from vllm_teach.models.decoder import Decoder


def decoder_parts(
    decoder: Decoder, attend: Attend | None = None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return (hidden, head) of `decoder` for ONE sequence that starts at position 0, without a cache.

    `hidden(token_ids)` maps int64 `[len]`, on any device, to hidden states `[len, hidden_size]`; `head` maps rows of
    them to logits `[rows, vocab_size]`. `attend` mixes the tokens, full causal attention by default. For
    `quantization.perplexity(hidden, ids, head=head, window=…)`.
    """
    attend = attend or full_causal()

    def hidden(token_ids: Tensor) -> Tensor:
        ids = token_ids.to(decoder.device)
        return decoder(ids, torch.arange(len(ids), device=ids.device), attend)

    return hidden, decoder.logits
