"""Interpolated Kneser-Ney against a second implementation: dictionaries and the textbook formula, n-gram by n-gram."""

import math
from collections import Counter

import numpy as np
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.training import KneserNey
from vllm_teach.training.kneser_ney import estimate_discounts

VOCAB, END = 7, 0


@pytest.fixture(scope="module")
def toy() -> list[list[int]]:
    generator = np.random.default_rng(1)
    # Skewed, so that trigrams occur once, twice, three, four and more times; token 6 is never seen.
    draw = [generator.choice([1, 2, 3, 4, 5], size=n, p=[0.5, 0.3, 0.1, 0.07, 0.03]) for n in (24, 0, 19, 1, 32)]
    return [document.tolist() for document in draw]


class BruteForce:
    """Chen and Goodman 1999, equations 16 to 21, word by word."""

    def __init__(self, documents, modified):
        self.modified = modified
        trigrams = Counter()
        for document in documents:
            padded = [END, END, *map(int, document), END]
            trigrams.update(tuple(padded[i : i + 3]) for i in range(len(padded) - 2))
        bigrams = Counter(gram[1:] for gram in trigrams)  # how many different tokens came before
        unigrams = Counter(gram[1:] for gram in bigrams)
        self.counts = {3: trigrams, 2: bigrams, 1: unigrams}

    def discount(self, n, count):
        have = Counter(self.counts[n].values())
        if count == 0:
            return 0.0
        if not self.modified:
            return have[1] / (have[1] + 2 * have[2]) if have[1] else 0.5
        try:
            y = have[1] / (have[1] + 2 * have[2])
            by_count = [1 - 2 * y * have[2] / have[1], 2 - 3 * y * have[3] / have[2], 3 - 4 * y * have[4] / have[3]]
        except ZeroDivisionError:
            by_count = [0, 0, 0]
        return (by_count if min(by_count) > 0 else [0.5, 1, 1.5])[min(count, 3) - 1]

    def probability(self, gram):
        if not gram:
            return 1 / VOCAB
        counts = self.counts[len(gram)]
        siblings = {other: count for other, count in counts.items() if other[:-1] == gram[:-1]}
        lower = self.probability(gram[1:])
        if not siblings:
            return lower
        total = sum(siblings.values())
        freed = sum(self.discount(len(gram), count) for count in siblings.values())
        count = counts.get(gram, 0)
        return (count - self.discount(len(gram), count) + freed * lower) / total


@pytest.mark.parametrize("modified", [False, True])
def test_all_probabilities_equal_brute_force(toy, modified):
    model, oracle = KneserNey(toy, VOCAB, modified=modified), BruteForce(toy, modified)
    for first in range(VOCAB):
        for second in range(VOCAB):
            expected = [oracle.probability((first, second, token)) for token in range(VOCAB)]
            np.testing.assert_allclose(model.probabilities((first, second)), expected, rtol=1e-12)


@pytest.mark.parametrize("modified", [False, True])
def test_they_sum_to_one_and_none_is_zero(toy, modified):
    model = KneserNey(toy, VOCAB, modified=modified)
    for first in range(VOCAB):
        for second in range(VOCAB):
            assert model.probabilities((first, second)).sum() == pytest.approx(1, abs=1e-12)
            assert model.probabilities((first, second)).min() > 0


def test_a_document_is_scored_from_its_start_to_its_end(toy):
    model, oracle = KneserNey(toy, VOCAB, modified=False), BruteForce(toy, modified=False)
    document = [2, 6, 1]
    padded = [END, END, *document, END]
    expected = [-math.log(oracle.probability(tuple(padded[i : i + 3]))) for i in range(4)]
    np.testing.assert_allclose(model.nlls(document), expected, rtol=1e-12)


def test_continuations_count_not_occurrences():
    """ "5" comes often, but only after "4": after anything else, "3", which comes after many, is more likely."""
    documents = [[4, 5] * 6, [1, 3, 2, 3, 6, 3, 1, 1, 2, 2, 6, 1, 2, 6]]
    model = KneserNey(documents, VOCAB, modified=False)
    never_seen = model.probabilities((6, 6))
    assert documents[0].count(5) > sum(document.count(3) for document in documents)
    assert never_seen[3] > never_seen[5]


def test_discounts_by_the_formula():
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4])
    np.testing.assert_allclose(estimate_discounts(counts, modified=False), [0, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(estimate_discounts(counts, modified=True), [0, 1 - 0.5, 2 - 0.75, 3 - 1])


def test_a_text_too_short_to_estimate_from_gets_fixed_discounts():
    for counts in ([5, 6, 7], [1, 1, 1], [1, 2, 3, 3, 3, 3, 3, 3]):
        np.testing.assert_allclose(estimate_discounts(np.array(counts), modified=True), [0, 0.5, 1, 1.5])
    np.testing.assert_allclose(estimate_discounts(np.array([5, 6, 7]), modified=False), [0, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(estimate_discounts(np.array([1, 1, 5]), modified=False), [0, 1, 1, 1])


def test_on_the_real_corpus_more_context_helps(documents):
    """Bytes as tokens: a trigram model must beat the best that knows no context, and an unseen text stays finite."""
    texts = [list(document.text[:3000].encode()) for document in documents[:60]]
    model = KneserNey(texts[:50], 256)
    nlls = np.concatenate([model.nlls(text) for text in texts[50:]])
    frequencies = np.bincount(np.concatenate(texts[50:]), minlength=256) / sum(map(len, texts[50:]))
    entropy = -sum(p * math.log(p) for p in frequencies if p)
    assert nlls.mean() < entropy - 0.5
    assert np.isfinite(nlls).all()


def test_what_cannot_be():
    with pytest.raises(InvalidArgumentError, match=r"documents hold the ids 0 to 9: vocab_size=7 needs 0 to 6\."):
        KneserNey([[1, 9]], VOCAB)


def test_models_and_contexts_that_cannot_be():
    for arguments, words in (
        (([], 10), "documents is empty"),
        (([[]], 0), "vocab_size is 0"),
        (([[]], 2**21), "vocab_size is 2097152; give at most 2097151"),  # its cube does not fit into an int64
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            KneserNey(*arguments)
    for context in ((10, 0), (0, -1)):
        with pytest.raises(InvalidArgumentError, match="context holds the ids"):
            KneserNey([[1]], 10).probabilities(context)
