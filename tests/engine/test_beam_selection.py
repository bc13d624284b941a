"""The rules of beam search, driven by a tiny model without any cache: against transformers, and against all texts."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_teach.engine.beam_params import BeamSearchParams
from vllm_teach.engine.beam_selection import BeamSelection
from vllm_teach.errors import InvalidArgumentError

EOS = 2


@pytest.fixture(scope="module")
def make_model() -> Callable[[int], LlamaForCausalLM]:
    """Return a factory of random models with `vocab` tokens: one layer, its texts end early now and then."""

    def make(vocab: int) -> LlamaForCausalLM:
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.6,
        )
        return LlamaForCausalLM(config).eval()

    return make


@torch.inference_mode()
def search(model: LlamaForCausalLM, prompt: list[int], params: BeamSearchParams, stop_ids=(EOS,)) -> BeamSelection:
    selection = BeamSelection(params, frozenset(stop_ids), params.max_tokens)
    while not selection.done:
        rows = []
        for beam in selection.live:
            logprobs = model(torch.tensor([[*prompt, *beam.token_ids]])).logits[0, -1].log_softmax(-1)
            top = logprobs.topk(min(selection.num_candidates, len(logprobs)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            rows.append({token: (value, rank) for rank, (token, value) in enumerate(pairs, start=1)})
        before = [beam.token_ids for beam in selection.live]
        parents = selection.advance(rows)
        assert [beam.token_ids[:-1] for beam in selection.live] == [before[parent] for parent in parents]
    return selection


def theirs(model: LlamaForCausalLM, prompt: list[int], params: BeamSearchParams, stop_ids=(EOS,)):
    """Return transformers' [(score, new tokens)], which it pads behind the end-of-sequence."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=stop_ids[0] if stop_ids else 0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for score, tokens in zip(found.sequences_scores.tolist(), found.sequences[:, len(prompt) :].tolist(), strict=True):
        ends = [place for place, token in enumerate(tokens) if token in stop_ids]
        texts.append((score, tuple(tokens[: ends[0] + 1] if ends else tokens)))
    return texts


PROMPTS = [[1], [3, 4], [5, 6, 7, 8], [9, 9, 9], [3, 1, 4, 1, 5], [10, 7], [0, 4, 11], [8, 7]]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
def test_equals_transformers(make_model, early_stopping, length_penalty) -> None:
    model = make_model(12)
    ended_early = 0
    for prompt in PROMPTS:
        params = BeamSearchParams(4, 8, length_penalty=length_penalty, early_stopping=early_stopping)
        ended = search(model, prompt, params).ended
        expected = theirs(model, prompt, params)
        assert [beam.token_ids for _, beam in ended] == [tokens for _, tokens in expected]
        assert [score for score, _ in ended] == pytest.approx([score for score, _ in expected], abs=1e-4)
        ended_early += sum(beam.token_ids[-1] == EOS for _, beam in ended)
    assert 0 < ended_early < 4 * len(PROMPTS)  # so that the rules about texts that ended were at work


@pytest.mark.parametrize("stop_ids", [(), (2, 3), (2, 3, 5)])
def test_equals_transformers_with_other_ends(make_model, stop_ids) -> None:
    model = make_model(32)
    for prompt in PROMPTS[:4]:
        params = BeamSearchParams(3, 7)
        ended = search(model, prompt, params, stop_ids).ended
        assert [beam.token_ids for _, beam in ended] == [each for _, each in theirs(model, prompt, params, stop_ids)]


def all_texts(model: LlamaForCausalLM, prompt: list[int], length: int, penalty: float) -> list[tuple[float, tuple]]:
    """Return every text of at most `length` tokens that ends, by EOS or length, with its score, the best first."""
    vocab = model.config.vocab_size
    found = {}
    with torch.inference_mode():
        for text in itertools.product(range(vocab), repeat=length):
            logits = model(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
            size = text.index(EOS) + 1 if EOS in text else length
            logprob = sum(logits[place, text[place]].item() for place in range(size))
            found[text[:size]] = logprob / size**penalty
    return sorted(((score, text) for text, score in found.items()), reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_wide_enough_it_finds_the_best_of_all_texts(make_model, length_penalty) -> None:
    """With a place for every text that could matter, beam search is exhaustive."""
    model, prompt = make_model(6), [1, 3]
    expected = all_texts(model, prompt, 3, length_penalty)
    assert len(expected) == 1 + 5 + 5 * 5 * 6
    params = BeamSearchParams(len(expected), 3, length_penalty=length_penalty, early_stopping="never")
    ended = search(model, prompt, params).ended
    assert len(ended) == len(expected)
    assert [score for score, _ in ended] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert {beam.token_ids for _, beam in ended} == {text for _, text in expected}
    assert ended[0][1].token_ids == expected[0][1]


def test_one_beam_is_greedy(make_model) -> None:
    model, prompt = make_model(32), [5, 6]
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < 10:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    ((_, beam),) = search(model, prompt, BeamSearchParams(1, 8, ignore_eos=True), ()).ended
    assert list(beam.token_ids) == tokens[2:]


def test_by_hand() -> None:
    """Width 2, tokens 0, 1 and the end 2. The prompt is no part of the length; the end is."""
    selection = BeamSelection(BeamSearchParams(2, 3), frozenset({2}), 3)
    first = {0: (-0.5, 1), 1: (-1.2, 2), 2: (-2.4, 3)}
    assert selection.advance([first]) == [0, 0]
    assert [beam.token_ids for beam in selection.live] == [(0,), (1,)]
    assert selection.ended == []  # the end was the third of three, and only the first two may end
    second = [{2: (-0.1, 1), 0: (-3.0, 2), 1: (-4.0, 3)}, {0: (-0.2, 1), 1: (-0.3, 2), 2: (-5.0, 3)}]
    assert selection.advance(second) == [1, 1]
    ((score, beam),) = selection.ended
    assert beam.token_ids == (0, 2)
    assert score == pytest.approx(-0.6 / 2)
    assert [beam.token_ids for beam in selection.live] == [(1, 0), (1, 1)]
    assert not selection.done
    assert selection.advance([{0: (-0.1, 1)}, {1: (-0.3, 1)}]) == []  # the third token is the last
    assert selection.done
    assert [beam.token_ids for _, beam in selection.ended] == [(0, 2), (1, 0, 0)]
    assert [score for score, _ in selection.ended] == pytest.approx([-0.3, -0.5])
    assert selection.ended[1][1].logprobs[0] is first


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", True),
        ("max_tokens", 1.5),
        ("temperature", 0.7),
        ("length_penalty", math.inf),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("ignore_eos", None),
        ("include_stop_str_in_output", "no"),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}="):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, field: value})
