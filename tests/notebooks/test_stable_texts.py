"""The texts that lessons 00 and 01 compare are the same on every machine, because no choice in them is close.

Another processor or another PyTorch adds floating-point numbers in another order, and logits change in about their
sixth digit. A greedy text survives that if at each step the best token leads by far more, and a rounded number does if
it lies well inside its rounding interval.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from vllm_teach import resources
from vllm_teach.attention import naive_attention
from vllm_teach.models import full_causal, load_model, load_tokenizer
from vllm_teach.teaching import notebooks

pytestmark = pytest.mark.real_model

LEAD = 1e-2  # logits differ by about 1e-4 between implementations in float32
START_HERE, NAIVE = "00_start_here", "01_naive_attention"
# lesson, prompt (a question is asked through the chat template), is it a question, greedy tokens that the lesson prints
GREEDY = [
    (START_HERE, "Why is the sky blue?", True, 29),
    (START_HERE, "Who wrote Hamlet?", True, 5),
    (START_HERE, "An inference engine is", False, 12),
    (NAIVE, "The opposite of hot is", False, 6),
    (NAIVE, "Lena bought a red apple and a green pear. Lena ate the red", False, 1),
]
SENTENCE = GREEDY[-1][1]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path)


def prompt_ids(tokenizer, prompt: str, question: bool) -> list[int]:
    if question:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def top_left(q, k, v):
    """PyTorch's own causal mask, which lesson 01 lets loose on a decode step."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def leads(model, ids: list[int], count: int, formula: Callable[..., torch.Tensor]) -> list[float]:
    """By how much the best logit leads at each of `count` greedy steps after `ids`, with a cache."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer, q, k, v):
        old_k, old_v = kept.get(layer, (k[:0], v[:0]))
        kept[layer] = k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        return formula(q[None], k[None], v[None])[0]

    found, new, seen = [], ids, 0
    for _ in range(count):
        hidden = model(torch.tensor(new), torch.arange(seen, seen + len(new)), attend)
        best = model.logits(hidden[-1:])[0].topk(2)
        seen, new = seen + len(new), [int(best.indices[0])]
        found.append(float(best.values[0] - best.values[1]))
    return found


@pytest.mark.parametrize(("lesson", "prompt", "question", "count"), GREEDY)
def test_no_greedy_choice_is_close(model, tokenizer, lesson, prompt, question, count):
    found = leads(model, prompt_ids(tokenizer, prompt, question), count, partial(naive_attention, causal=True))
    assert min(found) > LEAD, found


def test_the_wrong_masks_text_is_not_close_either(model, tokenizer):
    found = leads(model, tokenizer.encode("The opposite of hot is"), 6, top_left)
    assert min(found) > LEAD, found


@pytest.mark.parametrize(("lesson", "prompt"), [(lesson, prompt) for lesson, prompt, _, _ in GREEDY])
def test_the_lesson_still_uses_the_prompt(lesson, prompt):
    cells = notebooks.read(resources.folder("notebooks") / f"{lesson}.ipynb").cells
    assert any(prompt in cell.source for cell in cells if cell.cell_type == "code")


def room(value: float, step: float) -> float:
    """How far `value` is from where rounding to a multiple of `step` changes, in steps: 0 on the edge, 0.5 at most."""
    return abs(value / step % 1 - 0.5)


def test_room():
    assert room(0.0625, 0.001) == pytest.approx(0)
    assert room(0.062, 0.001) == pytest.approx(0.5)
    assert room(0.0624, 0.001) == pytest.approx(room(0.0626, 0.001)) == pytest.approx(0.1)


def next_probs(model, ids, attend):
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend)
    return model.logits(hidden[-1:])[0].double()


def test_rounded_probabilities_of_lesson_00_lie_inside_their_interval(model, tokenizer):
    logits = next_probs(model, tokenizer.encode("An inference engine is"), full_causal())
    top = logits.softmax(-1).topk(5).values.tolist()
    for value in (*top, 1 - sum(top)):
        assert room(value, 0.01) > 0.02, value
    for temperature in (0.5, 1.0, 2.0):
        best = (logits / temperature).softmax(-1).topk(6).values.tolist()
        for value in (best[0], 1 - sum(best)):
            step = 10.0 ** (torch.tensor(value).log10().floor().item() - 1)  # two significant digits
            assert room(value, step) > 0.02, (temperature, value)


def test_rounded_weights_of_lesson_01_lie_inside_their_interval(model, tokenizer):
    ids, probs, lse = tokenizer.encode(SENTENCE), {}, {}

    def listen(silent, layer, q, k, v):
        out, sums, weights = naive_attention(q[None], k[None], v[None], causal=True, return_lse=True, return_probs=True)
        if not silent:
            probs[layer], lse[layer] = weights[0], sums
        out[0, :, [head for of, head in silent if of == layer]] = 0
        return out[0]

    percent = [float(next_probs(model, ids, partial(listen, ())).softmax(-1).max())]
    reading = {(layer, head): float(probs[layer][head, 15, 5]) for layer in probs for head in range(9)}
    strong = [place for place, weight in reading.items() if weight > 0.5]
    assert min(abs(weight - 0.5) for weight in reading.values()) > 0.01
    for silent in ([(17, 5)], strong):
        percent.append(float(next_probs(model, ids, partial(listen, silent)).softmax(-1).max()))
    percent += [reading[17, 5], float(probs[17][5, 8].max())]
    for layer, head in ((16, 0), (18, 8)):
        weights = probs[layer][head]
        percent += [float(weights[1:, 0].mean()), float(torch.diagonal(weights, -1)[1:].mean())]
    for value in percent:
        assert room(value, 0.01) > 0.02, percent
    assert room(max(float(value.max()) for value in lse.values()), 0.1) > 0.02
