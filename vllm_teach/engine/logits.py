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


def gumbel_noise(seed: int, size: int) -> Tensor:
    """Return `size` independent numbers from Gumbel's distribution, float64 on the CPU: the same for the same `seed`.

    A generator of its own, so that nothing but the seed counts; on the CPU, so that every device draws the same. A
    float32 has too few numbers near 1: over a large vocabulary the largest of them would be ties.
    """
    uniforms = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniforms.clamp_(min=2.0**-54).log_()).log_()


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Return a token per row, int64 `[rows]`, drawn by the softmax of `logits`; `noise` is Gumbel's, `[rows, vocab]`.

    The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, section 2): the place of the largest logit + noise is
    distributed as softmax(logits). Batch-mates change a row's logits in the last bits, since a matrix product of other
    size sums in another order. Here that decides only between two tokens that tie. Inverse transform sampling, where a
    number in [0, 1) is looked up among the running sums of all probabilities, would need one number instead of a
    vocabulary of them, but the errors add up along the vocabulary and every token behind moves: another seeded text.
    """
    return (logits.double() + noise).argmax(-1)
