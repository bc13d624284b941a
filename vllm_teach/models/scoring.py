"""A decoder as the two functions that measures of a model ask for: hidden states of a text, and logits of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import Attend, full_causal
from vllm_teach.models.decoder import Decoder


def decoder_parts(
    decoder: Decoder, attend: Attend | None = None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return (hidden, head) of `decoder` for ONE sequence that starts at position 0, without a cache.

    `hidden(token_ids)` maps int64 `[len]`, on any device, to hidden states `[len, hidden_size]`; `head` maps rows of
    them to logits `[rows, vocab_size]`. `attend` mixes the tokens, full causal attention by default. For
    `quantization.perplexity(hidden, ids, head=head, window=…)`. `hidden` raises InvalidArgumentError for token ids that
    are not flat and whole, or that the vocabulary lacks.
    """
    attend = attend or full_causal()

    def hidden(token_ids: Tensor) -> Tensor:
        _check_ids(token_ids, decoder.config.vocab_size)
        ids = token_ids.to(decoder.device)
        return decoder(ids, torch.arange(len(ids), device=ids.device), attend)

    return hidden, decoder.logits


def _check_ids(token_ids: Tensor, vocab_size: int) -> None:
    if token_ids.dim() != 1 or token_ids.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(
            f"token_ids has dtype {token_ids.dtype} and shape {list(token_ids.shape)}; give int64 [len]."
        )
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise InvalidArgumentError(
            f"token_ids holds {int(token_ids.min())} to {int(token_ids.max())}; this model's ids are 0 to "
            f"{vocab_size - 1}."
        )
