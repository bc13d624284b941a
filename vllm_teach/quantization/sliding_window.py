"""Perplexity: how many equally likely tokens a model is as unsure as, at each token of a text.

A text longer than the model's context is read through a sliding window. Every token but the first is scored once, in
the first window that reaches it: what precedes it there is its context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.nn.functional as F
from tqdm import tqdm

from vllm_teach.errors import InvalidArgumentError

# Logits of this many tokens exist at once: of 49,152 float32 scores each, 50 MB.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Perplexity:
    """How well a model predicts a text. `nlls` is float64 `[tokens]`: -ln p of each scored token, in nats."""

    nlls: torch.Tensor

    @property
    def tokens(self) -> int:
        """How many tokens were scored: all but the first, which nothing precedes."""
        return len(self.nlls)

    @property
    def nll(self) -> float:
        """The mean of `nlls`, each token with the same weight, in nats per token."""
        return float(self.nlls.mean())

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite where float64 does not reach."""
        return math.inf if self.nll >= 709 else math.exp(self.nll)

    def __repr__(self) -> str:
        return f"Perplexity(nll={self.nll:.4f}, tokens={self.tokens}, perplexity={self.perplexity:.3f})"


def perplexity(
    model: Callable[[torch.Tensor], torch.Tensor],
    token_ids: Sequence[int] | torch.Tensor,
    *,
    window: int,
    stride: int | None = None,
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    progress: bool = False,
) -> Perplexity:
    """Return how well `model` predicts each token of `token_ids` but the first.

    `model` takes token ids, int64 `[len]` with len <= `window`, and returns logits `[len, vocab]`. With `head`, it
    returns hidden states `[len, hidden]` instead, and `head` turns rows of them into logits: then those of 256 tokens
    exist at once, not those of a window. The log-softmax is taken in float32, or in the logits' float64.

    The first window holds the first `window` tokens; each next one begins `stride` tokens further on (half a window by
    default) and scores what no window before it reached, so with at least `window` - `stride` tokens of context. A
    smaller stride costs more windows and gives more context.

    Raises InvalidArgumentError when there are fewer than two tokens, when `window` or `stride` do not fit, or when
    the logits are not `[len, vocab]`, have no entry for a token, or leave its probability undefined (NaN).
    """
    ids = check_ids(token_ids)
    window = check_window(window)
    stride = _check_stride(window, stride)
    spans = list(windows(len(ids), window, stride))
    nlls = torch.empty(len(ids) - 1, dtype=torch.float64)
    with torch.inference_mode():
        for start, first, end in tqdm(spans, desc="perplexity", unit="window", disable=not progress):
            states = model(ids[start:end])
            if not isinstance(states, torch.Tensor) or states.dim() != 2 or len(states) != end - start:
                raise InvalidArgumentError(
                    f"model returned {_shown(states)} for {end - start} tokens: it must return "
                    f"[{end - start}, {'hidden' if head else 'vocab'}]."
                )
            # Row t predicts token t + 1, so tokens first … end - 1 are predicted by the rows one before them.
            for rows in torch.arange(first - 1 - start, end - 1 - start).split(_ROWS_AT_ONCE):
                chosen = states[rows[0] : rows[-1] + 1]  # [rows, hidden or vocab]
                place = slice(start + int(rows[0]), start + int(rows[-1]) + 1)
                nlls[place] = _nlls(chosen if head is None else head(chosen), ids[place.start + 1 : place.stop + 1])
    if (undefined := torch.nonzero(nlls.isnan())).numel():
        raise InvalidArgumentError(
            f"model gives token {int(undefined[0]) + 1} no probability, and {len(undefined)} of {len(nlls)} in all: "
            "its logits hold NaN or +inf."
        )
    return Perplexity(nlls)


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first, end) for each window over `length` tokens: it reads start … end - 1, scores first … end - 1.

    The `first`s and `end`s join without gap or overlap from 1 to `length`.
    """
    first = 1
    for start in range(0, length, stride):
        end = min(start + window, length)
        yield start, first, end
        if end == length:
            return
        first = end


def _nlls(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    fits = isinstance(logits, torch.Tensor) and not logits.is_complex() and logits.dim() == 2
    if not fits or len(logits) != len(targets) or logits.shape[1] <= int(targets.max()):
        raise InvalidArgumentError(
            f"logits have {_shown(logits)} for {len(targets)} tokens with ids up to {int(targets.max())}: "
            "they must be real numbers [tokens, vocab], of a vocabulary that holds the ids."
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets.to(logits.device), reduction="none").double().cpu()


def check_ids(token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Return `token_ids` as int64 `[tokens]` on the CPU; InvalidArgumentError unless they are two ids or more."""
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"token_ids is no flat sequence of ids ({error}): give two ids or more.") from error
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 1 or len(ids) < 2 or not whole:
        raise InvalidArgumentError(
            f"token_ids has dtype {ids.dtype} and shape {list(ids.shape)}: give a flat sequence of two ids or more."
        )
    ids = ids.long().cpu()
    if int(ids.min()) < 0:
        raise InvalidArgumentError(f"token_ids holds {int(ids.min())}: ids are 0 or more.")
    return ids


def _shown(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"


def check_window(window: int, context: float = math.inf) -> int:
    """Return `window` as an int; InvalidArgumentError unless it is 2 or more tokens and at most a model's `context`."""
    if not _whole(window) or window < 2:
        raise InvalidArgumentError(f"window={window!r} is not valid: give a whole number of tokens, 2 or more.")
    if window > context:
        raise InvalidArgumentError(f"window={window} is longer than the model's context: use at most {context}.")
    return int(window)


def _check_stride(window: int, stride: int | None) -> int:
    if stride is None:
        return window // 2
    if not _whole(stride) or not 1 <= stride < window:
        # With a stride of `window`, the first token of each window would have no context.
        raise InvalidArgumentError(f"stride={stride!r} is not valid: give a whole number from 1 to {window - 1}.")
    return int(stride)


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
