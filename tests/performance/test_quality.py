import math

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.load import load_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.performance.quality import Quality, measure_quality


def quality(nlls, chosen, right):
    return Quality(torch.tensor(nlls, dtype=torch.float64), torch.tensor(chosen), torch.tensor(right))


def test_losses_by_hand():
    before = quality([1.0, 1.0, 2.0, 4.0], [5, 6, 7, 8], [True, True, True, True])
    after = quality([1.0, 1.0, 2.0, 4.4], [5, 6, 9, 9], [True, True, False, True])
    assert after.losses(before) == {
        "perplexity": pytest.approx(100 * (math.exp(0.1) - 1)),
        "nats a token": pytest.approx(5.0),
        "right tokens": pytest.approx(25.0),
        "other choices": pytest.approx(50.0),
    }
    assert before.losses(before) == dict.fromkeys(after.losses(before), 0.0)
    with pytest.raises(InvalidArgumentError, match="1 tokens for 4"):
        after.losses(quality([1.0], [1], [True]))


@pytest.fixture(scope="module")
def tiny():
    return load_model(resolve_model("tiny"))


def test_each_token_is_judged_in_the_first_window_that_reaches_it(tiny):
    ids = torch.randint(2048, (500,), generator=torch.Generator().manual_seed(0))
    nlls, chosen = torch.empty(500, dtype=torch.float64), torch.empty(500, dtype=torch.int64)
    for start in reversed(range(0, 500, 192)):  # what an earlier window says stays
        window = ids[start : start + 256]
        logits = tiny.logits(tiny(window, torch.arange(len(window)), full_causal()))[:-1].double()
        nlls[start + 1 : start + len(window)] = -logits.log_softmax(-1).gather(1, window[1:, None])[:, 0]
        chosen[start + 1 : start + len(window)] = logits.argmax(-1)
    found = measure_quality(tiny, ids, window=256)
    torch.testing.assert_close(found.nlls, nlls[1:], rtol=1e-4, atol=1e-4)
    assert found.chosen.tolist() == chosen[1:].tolist()
    assert found.right.tolist() == (chosen[1:] == ids[1:]).tolist()


@pytest.mark.parametrize(
    ("ids", "window", "words"),
    [
        (torch.arange(9), 1, "window=1 is not valid: give a whole number of tokens, 2 or more"),
        (torch.arange(9), 513, "window=513 is longer than the model's context: use at most 512"),
        (torch.arange(1), 8, r"shape \[1\]: give a flat sequence of two ids or more"),
    ],
)
def test_windows_and_texts_that_cannot_be_are_refused(ids, window, words, tiny):
    """A window of 1 once was an error of Python's range, a longer one than the context was computed without a word."""
    with pytest.raises(InvalidArgumentError, match=words):
        measure_quality(tiny, ids, window=window)


def test_a_reference_that_is_never_right_has_nothing_to_lose():
    """Once a division by zero."""
    never = quality([1.0, 2.0], [5, 6], [False, False])
    with pytest.raises(InvalidArgumentError, match="reference gets none of 2 tokens right"):
        never.losses(never)
