"""Changes to a batch of logits before a token is drawn: pure functions on `[rows, vocab]`, one setting per row.

Each row's result depends on that row alone. Where a cut falls between equal values all of them stay in, so that the
result does not depend on the order in which a sort happens to leave them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def count_tokens(token_lists: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Return how often each token stands in each list: float32 `[rows, vocab_size]`."""
    rows = [row for row, tokens in enumerate(token_lists) for _ in tokens]
    columns = [token for tokens in token_lists for token in tokens]
    counts = torch.zeros(len(token_lists), vocab_size, device=device)
    index = (
        torch.tensor(rows, device=device, dtype=torch.long),
        torch.tensor(columns, device=device, dtype=torch.long),
    )
    return counts.index_put_(index, torch.ones(len(rows), device=device), accumulate=True)


def penalize(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return logits with the three penalties, each `[rows]`; the counts are `[rows, vocab]`.

    Repetition (Keskar et al. 2019, CTRL) divides a positive logit and multiplies a negative one, for tokens of prompt
    and output; presence and frequency (OpenAI's) are subtracted for tokens of the output.
    """
    seen = (prompt_counts > 0) | (output_counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * (output_counts > 0)


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Set all but each row's `k` largest logits to -inf; `k` is int64 `[rows]`, from 1 to vocab."""
    largest = logits.topk(int(k.max()), dim=-1).values
    return logits.masked_fill(logits < largest.gather(1, k[:, None] - 1), -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep each row's fewest most likely tokens whose probability reaches `p` (`[rows]`, in (0, 1]), at least one.

    Nucleus sampling (Holtzman et al. 2019).
    """
    probabilities = logits.softmax(-1)
    ordered = probabilities.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    kept = (before < p[:, None]).sum(-1, keepdim=True)
    # A tiny p rounds to zero in float32: the most likely token stays in all the same.
    smallest = ordered.gather(1, kept.clamp(min=1) - 1)
    return logits.masked_fill(probabilities < smallest, -torch.inf)


def keep_min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the tokens at least `p` (`[rows]`, 0 to 1) times as likely as the row's most likely one."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + p[:, None].log(), -torch.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return a token per row, int64 `[rows]`: where the running sum of probabilities passes `uniforms` (`[rows]`).

    Inverse transform sampling: one number in [0, 1) decides a row, so a request needs one random number a token. The
    sum runs in float64: over a large vocabulary a float32 sum is off by more than its rarest tokens.
    """
    total = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    # Kept below the whole sum, so that rounding never leads past the last token that has a probability.
    target = torch.minimum(uniforms.double()[:, None] * total[:, -1:], total[:, -1:].nextafter(total.new_zeros(1)))
    return torch.searchsorted(total, target, right=True)[:, 0]
