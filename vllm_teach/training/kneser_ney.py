"""An interpolated Kneser-Ney trigram model (Kneser and Ney 1995; Chen and Goodman 1999): the bar for a neural one.

A trigram's count, less a discount, says how likely a token is after the two before it. What the discounts took away is
given to the bigram's estimate, and so on down to the uniform distribution. Below the trigrams it is not counts that
matter but continuations: after how many different tokens did this one come? "Francisco" is frequent, but follows one
word only, and so says little about what follows another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

_LARGEST_VOCABULARY = 2**21 - 1


@dataclass(frozen=True)
class _Order:
    """The n-grams of one length: `keys` (sorted) with `counts`, and for each context what interpolation needs.

    An n-gram's key is its tokens read as digits in base `vocab_size`; its context is the key without the last digit.
    """

    keys: Ids
    counts: Ids
    discounts: Floats  # [4]: for a count of 0 (nothing), 1, 2, and 3 or more
    contexts: Ids  # sorted, each once
    totals: Ids  # [contexts] sum of the counts of the n-grams with this context
    freed: Floats  # [contexts] sum of the discounts that these n-grams gave up

    @classmethod
    def of(cls, keys: Ids, counts: Ids, vocab_size: int, modified: bool) -> _Order:
        discounts = estimate_discounts(counts, modified)
        contexts, starts = np.unique(keys // vocab_size, return_index=True)
        taken = discounts[np.minimum(counts, 3)]
        return cls(keys, counts, discounts, contexts, np.add.reduceat(counts, starts), np.add.reduceat(taken, starts))

    def interpolate(self, keys: Ids, vocab_size: int, lower: Floats) -> Floats:
        """Return the probability of each n-gram's last token after its context, from the lower order's `lower`."""
        counts = _look_up(self.keys, self.counts, keys, 0)
        totals = _look_up(self.contexts, self.totals, keys // vocab_size, 1)
        # A context never seen has nothing to discount: all its mass is the lower order's.
        freed = _look_up(self.contexts, self.freed, keys // vocab_size, 1.0)
        return (counts - self.discounts[np.minimum(counts, 3)] + freed * lower) / totals


class KneserNey:
    """A trigram model over token ids below `vocab_size`, estimated from `documents`.

    Each document is a sequence of ids; it is preceded by two ends of text and closed by one (`end_id`), which is
    predicted too. `modified` takes Chen and Goodman's three discounts per order (for counts of 1, 2, and 3 or more) in
    place of Kneser and Ney's one; it is the stronger model.

    Raises InvalidArgumentError for an id out of range, no document, or a vocabulary of more than 2,097,151 tokens,
    whose trigrams do not fit into 63 bits.
    """

    def __init__(
        self, documents: Sequence[Sequence[int]], vocab_size: int, *, end_id: int = 0, modified: bool = True
    ) -> None:
        self.vocab_size, self.end_id = check_count("vocab_size", vocab_size, 1), end_id
        if vocab_size > _LARGEST_VOCABULARY:
            raise InvalidArgumentError(f"vocab_size is {vocab_size}; give at most {_LARGEST_VOCABULARY}.")
        if not len(documents):
            raise InvalidArgumentError("documents is empty; give one or more.")
        trigrams = np.concatenate([self._trigrams(document) for document in documents])
        self._orders = []
        keys, counts = np.unique(trigrams, return_counts=True)
        for _ in range(3):
            self._orders.append(_Order.of(keys, counts, vocab_size, modified))
            # Dropping the first token of each different n-gram: how often a shorter one is left over is after how many
            # different tokens it came.
            keys, counts = np.unique(keys % vocab_size ** (3 - len(self._orders)), return_counts=True)

    def probabilities(self, context: tuple[int, int]) -> Floats:
        """Return the probability of every token after the two of `context`, float64 `[vocab_size]`; they sum to 1."""
        first, second = context
        self._check_ids(min(context), max(context), "context holds")
        return self._score(np.arange(self.vocab_size) + self.vocab_size * (second + self.vocab_size * first))

    def nlls(self, document: Sequence[int]) -> Floats:
        """Return -ln p of each token of `document` and of the end of text behind it, in nats, `[len + 1]`."""
        return -np.log(self._score(self._trigrams(document)))

    def _score(self, trigrams: Ids) -> Floats:
        probability = np.full(len(trigrams), 1 / self.vocab_size)
        for length, order in enumerate(reversed(self._orders), start=1):
            probability = order.interpolate(trigrams % self.vocab_size**length, self.vocab_size, probability)
        return probability

    def _trigrams(self, document: Sequence[int]) -> Ids:
        ids = np.array([self.end_id, self.end_id, *document, self.end_id], dtype=np.int64)
        self._check_ids(ids.min(), ids.max(), "documents hold")
        return (ids[:-2] * self.vocab_size + ids[1:-1]) * self.vocab_size + ids[2:]

    def _check_ids(self, lowest: int, highest: int, where: str) -> None:
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidArgumentError(
                f"{where} the ids {lowest} to {highest}: vocab_size={self.vocab_size} needs 0 to {self.vocab_size - 1}."
            )


def estimate_discounts(counts: Ids, modified: bool) -> Floats:
    """Return what is taken from a count of 0 (nothing), 1, 2, and 3 or more: float64 `[4]`.

    Chen and Goodman 1999, equations 13 and 17, from how many n-grams occur once, twice, three and four times. A text
    so short that these do not give discounts between 0 and the count gets fixed ones (KenLM's --discount_fallback).
    """
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2) if n1 else 0.0
    if not modified:
        return np.array([0, y, y, y]) if y else np.array([0, 0.5, 0.5, 0.5])
    if 0 not in (n1, n2, n3):
        estimated = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (estimated[1:] > 0).all():
            return estimated
    return np.array([0, 0.5, 1.0, 1.5])


def _look_up(keys: Ids, values: NDArray, wanted: Ids, default: float) -> NDArray:
    """Return the value beside each of `wanted` in the sorted `keys`, `default` where it is not there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], default)
