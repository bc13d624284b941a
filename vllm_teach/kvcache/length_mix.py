"""Prompt and output lengths as users bring them: most short, some long, none known beforehand.

Lognormal, with the means of the two data sets of the PagedAttention paper (Kwon et al. 2023, figure 11). The paper
prints the means and a histogram; the sigmas are ours, chosen by the look of the histograms, and stated here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class LengthMix:
    """Lengths in tokens: the means before clipping, the sigmas of their logarithms, and where they are clipped.

    A prompt has 1 to `max_prompt` tokens, an output 1 or more; the output is cut so that both have at most `max_total`.
    Clipping lowers the means a little: report those of what was drawn.
    """

    name: str
    mean_prompt: float
    mean_output: float
    sigma_prompt: float = 1.0
    sigma_output: float = 1.0
    max_prompt: int = 1024
    max_total: int = 2048

    def draw(self, count: int, seed: int = 0) -> list[tuple[int, int]]:
        """Return `count` pairs (prompt length, output length); the same for the same seed, on every machine."""
        if count < 1:
            raise InvalidArgumentError(f"count={count} is not valid: draw at least one request.")
        source = random.Random(seed)
        lengths = []
        for _ in range(count):
            prompt = min(_lognormal(source, self.mean_prompt, self.sigma_prompt), self.max_prompt)
            output = min(_lognormal(source, self.mean_output, self.sigma_output), self.max_total - prompt)
            lengths.append((prompt, output))
        return lengths


SHAREGPT = LengthMix("sharegpt", mean_prompt=161.3, mean_output=338.0)
ALPACA = LengthMix("alpaca", mean_prompt=19.3, mean_output=58.5, sigma_prompt=0.5)
MIXES = {mix.name: mix for mix in (SHAREGPT, ALPACA)}


def _lognormal(source: random.Random, mean: float, sigma: float) -> int:
    """Return a length of at least 1: exp of a normal variable, whose own mean is ln(mean) - sigma² / 2."""
    return max(1, round(source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
