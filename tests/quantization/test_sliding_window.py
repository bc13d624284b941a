"""Perplexity against a plain loop over tokens, against closed forms, and against transformers on the real model."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import load_model
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.quantization import Perplexity, perplexity
from vllm_teach.quantization.sliding_window import check_window, windows

VOCAB = 11


class RunningMean:
    """A model whose logits depend on all tokens it is given so far, and which records how long its inputs were."""

    def __init__(self, dtype=torch.float64):
        self.table = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(
            dtype
        )
        self.lengths = []

    def __call__(self, ids):
        self.lengths.append(len(ids))
        return self.table[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]


def by_hand(model, ids, window, stride):
    """Score each token in the first window that holds it."""
    nlls = []
    for token in range(1, len(ids)):
        start = next(start for start in range(0, len(ids), stride) if start + window > token)
        context = torch.tensor(ids[start:token])
        nlls.append(-torch.log_softmax(model(context)[-1], dim=-1)[ids[token]].item())
    return nlls


texts = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=60)


@given(ids=texts, window=st.integers(2, 20), data=st.data())
def test_every_token_is_scored_once_in_its_first_window(ids, window, data):
    stride = data.draw(st.integers(1, window - 1))
    model = RunningMean()
    result = perplexity(model, ids, window=window, stride=stride)
    assert max(model.lengths) <= window
    assert result.nlls.tolist() == pytest.approx(by_hand(model, ids, window, stride), abs=1e-12)
    assert result.tokens == len(ids) - 1
    assert result.nll == pytest.approx(sum(result.nlls.tolist()) / (len(ids) - 1))
    assert result.perplexity == pytest.approx(math.exp(result.nll))


@given(length=st.integers(2, 300), window=st.integers(2, 50), data=st.data())
def test_windows_join_and_give_context(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    reached = 1
    for start, first, end in windows(length, window, stride):
        assert first == reached < end <= length
        assert end - start <= window
        assert first - start >= min(window - stride, first)  # context of the first scored token
        reached = end
    assert reached == length


def test_the_default_stride_is_half_a_window():
    ids = torch.randint(VOCAB, (50,)).tolist()
    ours = perplexity(RunningMean(), ids, window=9).nlls
    assert torch.equal(ours, perplexity(RunningMean(), ids, window=9, stride=4).nlls)


def test_a_model_that_knows_nothing_has_the_vocabularys_size_as_perplexity():
    result = perplexity(lambda ids: torch.zeros(len(ids), VOCAB), list(range(VOCAB)), window=4)
    assert result.perplexity == pytest.approx(VOCAB)
    assert repr(result) == f"Perplexity(nll={math.log(VOCAB):.4f}, tokens=10, perplexity=11.000)"


def test_a_model_that_is_certain_and_wrong_is_infinitely_perplexed():
    result = perplexity(lambda ids: torch.eye(VOCAB)[ids] * 1e4, [1, 2, 3], window=2)
    assert result.perplexity == math.inf
    assert Perplexity(torch.zeros(3)).perplexity == 1.0


def test_a_head_sees_few_rows_at_a_time_and_only_those_that_are_scored():
    ids = torch.randint(VOCAB, (1500,), generator=torch.Generator().manual_seed(0))
    model, rows = RunningMean(), []

    def head(hidden):
        rows.append(len(hidden))
        return hidden * 2.0

    whole = perplexity(lambda tokens: model(tokens) * 2.0, ids, window=1000, stride=300)
    parts = perplexity(model, ids, window=1000, stride=300, head=head)
    torch.testing.assert_close(parts.nlls, whole.nlls)
    assert max(rows) == 256
    assert sum(rows) == len(ids) - 1


def test_low_precision_logits_are_softmaxed_in_float32():
    ids = torch.randint(VOCAB, (40,)).tolist()
    result = perplexity(lambda tokens: RunningMean()(tokens).bfloat16(), ids, window=8)
    expected = perplexity(lambda tokens: RunningMean()(tokens).bfloat16().double(), ids, window=8)
    torch.testing.assert_close(result.nlls, expected.nlls, rtol=0, atol=1e-6)


def test_progress_goes_to_stderr_when_asked_for(capsys):
    perplexity(RunningMean(), [1, 2, 3, 4], window=2)
    assert capsys.readouterr().err == ""
    perplexity(RunningMean(), [1, 2, 3, 4], window=2, progress=True)
    assert "perplexity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        ([1], {}, r"token_ids has dtype torch.int64 and shape \[1\]: give a flat sequence of two ids or more"),
        ([], {}, "give a flat sequence"),
        ([[1, 2], [3, 4]], {}, r"shape \[2, 2\]"),
        ([1.0, 2.0], {}, "dtype torch.float32"),
        ([1, -1], {}, "token_ids holds -1: ids are 0 or more"),
        (None, {}, "token_ids is no flat sequence of ids"),
        ("abc", {}, "token_ids is no flat sequence of ids"),
        (["a", "b"], {}, "token_ids is no flat sequence of ids"),
        ([[1], [2, 3]], {}, "token_ids is no flat sequence of ids"),
        ([1, 2**70], {}, "token_ids is no flat sequence of ids"),
        (torch.zeros(3, dtype=torch.complex64), {}, "dtype torch.complex64"),
        ([True, False], {}, "dtype torch.bool"),
        ([1, 2], {"window": math.inf}, "window=inf is not valid"),
        ([1, 2], {"head": lambda hidden: None}, "logits have type NoneType for 1 tokens"),
        ([1, 2], {"head": lambda hidden: hidden + 0j}, "they must be real numbers"),
        ([1, 2], {"window": 1}, "window=1 is not valid: give a whole number of tokens, 2 or more"),
        ([1, 2], {"window": 4.0}, "window=4.0 is not valid"),
        ([1, 2], {"stride": 0}, "stride=0 is not valid: give a whole number from 1 to 7"),
        ([1, 2], {"stride": 8}, "stride=8 is not valid"),
        ([1, 2], {"stride": True}, "stride=True is not valid"),
        ([1, VOCAB], {}, rf"logits have shape \[1, {VOCAB}\] for 1 tokens with ids up to {VOCAB}"),
        ([1, 2], {"head": lambda hidden: hidden[0]}, rf"logits have shape \[{VOCAB}\]"),
    ],
)
def test_arguments_that_cannot_work(ids, arguments, message):
    def table(tokens):
        return torch.zeros(len(tokens), VOCAB)

    with pytest.raises(InvalidArgumentError, match=message):
        perplexity(table, ids, **{"window": 8, **arguments})


def test_a_window_may_be_as_long_as_the_context():
    assert check_window(np.int64(8), 8) == 8
    with pytest.raises(InvalidArgumentError, match="window=9 is longer than the model's context: use at most 8"):
        check_window(9, 8)


def test_models_of_the_wrong_shape_are_named():
    with pytest.raises(InvalidArgumentError, match=r"model returned shape \[1, 2, 11\] for 2 tokens: .* \[2, vocab\]"):
        perplexity(lambda ids: torch.zeros(1, 2, VOCAB), [1, 2], window=4)
    with pytest.raises(InvalidArgumentError, match=r"must return \[2, hidden\]"):
        perplexity(lambda ids: torch.zeros(1, VOCAB), [1, 2], window=4, head=lambda hidden: hidden)


@pytest.mark.real_model
def test_smollm2_equals_a_plain_transformers_loop(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = "The lighthouse keeper counted the ships that passed, and wrote each name into a long grey book. "
    ids = tokenizer.encode(text + "On the last page he wrote: nothing comes from the west any more. " + text * 2)
    window, stride = 40, 24
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32, local_files_only=True).eval()
    # The loop of transformers' guide to perplexity, with its mean weighted by the tokens that are scored.
    total, scored, before = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        inputs = torch.tensor([ids[start:end]])
        labels = inputs.clone()
        labels[:, : before - start] = -100
        with torch.no_grad():
            loss = reference(inputs, labels=labels).loss.item()
        count = int((labels[0, 1:] != -100).sum())
        total, scored, before = total + loss * count, scored + count, end
        if end == len(ids):
            break
    assert scored == len(ids) - 1 > 60

    hidden, head = decoder_parts(load_model(smollm2_path, torch.float32))
    result = perplexity(hidden, ids, window=window, stride=stride, head=head)
    assert result.tokens == scored
    assert result.nll == pytest.approx(total / scored, abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(total / scored), rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_undefined_probabilities_are_an_error_and_no_number(value):
    """A NaN compares as false with everything, and must not pass for infinite perplexity or for a good one."""

    def broken(ids):
        logits = torch.zeros(len(ids), VOCAB)
        logits[ids == 3] = value
        return logits

    with pytest.raises(InvalidArgumentError, match="model gives token 3 no probability, and 1 of 4 in all"):
        perplexity(broken, [1, 2, 3, 4, 5], window=4)
    assert math.isnan(Perplexity(torch.tensor([math.nan])).perplexity)


def test_a_token_that_is_impossible_has_infinite_perplexity():
    logits = torch.zeros(VOCAB)
    logits[2] = -math.inf
    assert perplexity(lambda ids: logits.expand(len(ids), -1), [1, 2, 3], window=2).perplexity == math.inf


def test_numpys_numbers_are_numbers():
    ids = np.array([1, 2, 3, 4, 5])
    plain = perplexity(RunningMean(), ids.tolist(), window=4, stride=2)
    for dtype in (np.int64, np.int32, np.uint16, np.uint8):
        found = perplexity(RunningMean(), ids.astype(dtype), window=np.int64(4), stride=np.int32(2))
        assert torch.equal(found.nlls, plain.nlls)


def test_a_model_that_returns_no_tensor_is_named():
    for value, words in ((None, "type NoneType"), ((torch.zeros(2, VOCAB),), "type tuple")):
        with pytest.raises(InvalidArgumentError, match=f"model returned {words} for 2 tokens"):
            perplexity(lambda ids, value=value: value, [1, 2], window=4)
