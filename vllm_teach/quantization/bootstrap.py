"""How sure a difference of two perplexities is: the paired bootstrap (Efron and Tibshirani 1993, chapter 8).

Both models score the same tokens, and what is hard for one is hard for the other. So differences are resampled, token
by token of both at once; and in blocks of neighbours, since a token's difference tells something of the next one's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError

BLOCK = 256  # tokens
_RESAMPLES_AT_ONCE = 1000


@dataclass(frozen=True)
class PerplexityChange:
    """The perplexity of one model over that of another, on the same tokens: `ratio`, and the interval it lies in.

    `low` and `high` bound the middle `confidence` of all resamples. `blocks` is how many blocks of tokens were drawn
    from.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    blocks: int

    @property
    def is_sure(self) -> bool:
        """Whether the interval leaves out 1: no change."""
        return not self.low <= 1 <= self.high

    def __str__(self) -> str:
        low, change, high = (f"{100 * (each - 1):+.2f} %" for each in (self.low, self.ratio, self.high))
        return f"perplexity {change} ({100 * self.confidence:g} % interval {low} … {high})"


def perplexity_change(
    nlls: Tensor,
    reference_nlls: Tensor,
    *,
    block: int = BLOCK,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PerplexityChange:
    """Return how the perplexity changes from `reference_nlls` to `nlls`, each `[tokens]`, -ln p of the same tokens.

    Whole runs of `block` tokens (the last one may be shorter) are drawn with replacement, as many as there are,
    `resamples` times; each draw gives one ratio of perplexities. The same `seed` gives the same interval.

    Raises InvalidArgumentError unless both are flat, finite and of one length that holds two blocks at least, and
    for a `block` or `resamples` below 1, a `seed` of more than 64 bits and a `confidence` outside of 0 … 1.
    """
    for name, value in (("block", block), ("resamples", resamples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name}={value!r} is not valid: give a whole number from 1.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise InvalidArgumentError(f"seed={seed!r:.80} is not valid: give a whole number of at most 64 bits.")
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise InvalidArgumentError(f"confidence={confidence!r} is not valid: give a number between 0 and 1, as 0.95.")
    if nlls.dim() != 1 or nlls.shape != reference_nlls.shape or len(nlls) <= block:
        raise InvalidArgumentError(
            f"nlls has shape {list(nlls.shape)} and reference_nlls {list(reference_nlls.shape)}: give one number for "
            f"each of the same tokens, more than {block} of them."
        )
    differences = nlls.double() - reference_nlls.double()
    if not differences.isfinite().all():
        raise InvalidArgumentError("nlls or reference_nlls hold NaN or infinity: give finite numbers.")
    blocks = differences.split(block)
    sums = torch.stack([each.sum() for each in blocks])
    lengths = torch.tensor([len(each) for each in blocks], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        count = min(_RESAMPLES_AT_ONCE, resamples - start)
        drawn = torch.randint(len(blocks), (count, len(blocks)), generator=generator)
        means.append(sums[drawn].sum(1) / lengths[drawn].sum(1))
    tail = (1 - confidence) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).exp().tolist()
    # Of the tensor: math.exp raises an error where float64 ends, and what overflows is infinite here.
    return PerplexityChange(float(differences.mean().exp()), low, high, confidence, len(blocks))
