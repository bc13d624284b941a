"""How well a model predicts text that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.quantization import perplexity
from vllm_teach.training.attend import window_attend
from vllm_teach.training.options import DTYPES

_WINDOWS_AT_ONCE = 16


@torch.inference_mode()
def stream_loss(model: Decoder, tokens: Tensor, *, window: int, dtype: str = "fp32") -> float:
    """Return the mean -ln p, in nats, of the ids of the stream `tokens` but the first; sets `model` to eval mode.

    A quick measure for the training loop: windows do not overlap, so a token has 1 … `window` tokens of context.
    `dtype` is "bf16" or "fp32". Raises InvalidArgumentError for another one, for fewer than two tokens, and for a
    `window` below 1.
    """
    check_count("window", window, 1)
    if len(tokens) < 2:
        raise InvalidArgumentError(f"tokens has {len(tokens)} ids: the first is not scored, so give two or more.")
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype={dtype!r} is not valid: use 'bf16' or 'fp32'.")
    model.eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, _WINDOWS_AT_ONCE * window):
        inputs, targets = (part[start:][: _WINDOWS_AT_ONCE * window] for part in (tokens[:-1], tokens[1:]))
        whole = len(inputs) // window * window
        for first, end, windows in ((0, whole, whole // window), (whole, len(inputs), 1)):
            if end > first:
                total += _sum(model, inputs[first:end], targets[first:end], windows, dtype)
    return total / (len(tokens) - 1)


def _sum(model: Decoder, inputs: Tensor, targets: Tensor, windows: int, dtype: str) -> float:
    positions = torch.arange(len(inputs) // windows).repeat(windows)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        logits = model.logits(model(inputs, positions, window_attend(windows, "sdpa")))
    return F.cross_entropy(logits.float(), targets, reduction="sum").item()


def document_nlls(model: Decoder, documents: Iterable[Sequence[int]], *, window: int, end_id: int = 0) -> Tensor:
    """Return -ln p of each token of each document and of the end of text behind it, in nats: float64 `[tokens]`.

    A document is read from its start, after one end of text, through a sliding window of `window` tokens in steps of
    half of it. `KneserNey.nlls` scores the same tokens. Raises InvalidArgumentError when there is no document.
    """
    documents = list(documents)
    if not documents:
        raise InvalidArgumentError("documents is empty; give one or more.")
    hidden, head = decoder_parts(model)
    return torch.cat([perplexity(hidden, [end_id, *ids, end_id], window=window, head=head).nlls for ids in documents])
