"""Lesson 09's checks: the right answers pass, and each known-wrong one is rejected."""

import pytest
import torch

from vllm_teach.teaching import check

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def grid(weights, bits, *, with_zero=True, points=False, whole=True, guard=True, rounding=round):
    """The grid of a group, with switches for what can go wrong."""
    low, high = float(weights.min()), float(weights.max())
    if with_zero:
        low, high = min(0.0, low), max(0.0, high)
    if guard and low == high:
        return 1.0, 0
    scale = (high - low) / (2**bits - (0 if points else 1))
    return scale, rounding(-low / scale) if whole else -low / scale


def symmetric(weights, bits):
    scale = 2 * float(weights.abs().max()) / (2**bits - 1)
    return (scale or 1.0), 2 ** (bits - 1)


def word(codes, order=ORDER, *, bits=4, signed=True):
    found = 0
    for nibble, channel in enumerate(order):
        found |= codes[channel] << (bits * nibble)
    return found - 2**32 if signed and found >= 2**31 else found


def step(weight, upper, i, scale, *, sign=-1, divide=True, row=None, inplace=False, first=1, nearest=torch.round):
    result = weight if inplace else weight.clone()
    rounded = nearest(weight[:, i] / scale) * scale
    error = (weight[:, i] - rounded) / (upper[i, i] if divide else 1)
    factors = upper[i] if row is None else row(upper, i)
    result[:, i + first :] += sign * error[:, None] * factors[i + first :]
    result[:, i] = rounded
    return result


def searched(weight, inputs, output_error):
    magnitudes = inputs.abs().mean(0)
    tried = [magnitudes ** (step / 20) for step in range(20)]
    return min(tried, key=lambda scales: output_error(weight, scales, inputs))


def power(alpha):
    return lambda weight, inputs, output_error: inputs.abs().mean(0) ** alpha


def rms(weight, inputs, output_error):
    tried = [inputs.square().mean(0) ** (step / 20) for step in range(12)]
    return min(tried, key=lambda scales: output_error(weight, scales, inputs))


RIGHT = {
    "grid_of_group": [grid],
    "pack_awq_word": [word],
    "gptq_step": [step],
    "salient_scales": [searched, rms],
}
WRONG = {
    "grid_of_group": {
        "points for steps": lambda w, b: grid(w, b, points=True),
        "0 left out": lambda w, b: grid(w, b, with_zero=False),
        "the zero is no whole number": lambda w, b: grid(w, b, whole=False),
        "the zero cut off": lambda w, b: grid(w, b, rounding=int),
        "no guard": lambda w, b: grid(w, b, guard=False),
        "symmetric": symmetric,
        "the zero alone": lambda w, b: grid(w, b)[1],
        "swapped": lambda w, b: grid(w, b)[::-1],
        "the smallest weight for the zero": lambda w, b: (grid(w, b)[0], float(w.min())),
        "4 bits always": lambda w, b: grid(w, 4),
        "the sign of the zero": lambda w, b: (grid(w, b)[0], -grid(w, b)[1]),
    },
    "pack_awq_word": {
        "in order": lambda c: word(c, range(8)),
        "from the highest": lambda c: word(c, ORDER[::-1]),
        "the inverse order": lambda c: word(c, (0, 4, 1, 5, 2, 6, 3, 7)),
        "unsigned": lambda c: word(c, signed=False),
        "a byte each": lambda c: word(c, bits=8),
        "odd channels first": lambda c: word(c, (1, 3, 5, 7, 0, 2, 4, 6)),
        "a list": lambda c: [c[channel] for channel in ORDER],
        "a sum": lambda c: sum(c),
        "the codes changed": lambda c: (word(c), c.sort())[0],
    },
    "gptq_step": {
        "rounding alone": lambda *a: step(*a, sign=0),
        "the wrong sign": lambda *a: step(*a, sign=1),
        "not divided by the diagonal": lambda *a: step(*a, divide=False),
        "the column for the row": lambda *a: step(*a, row=lambda upper, i: upper[:, i]),
        "the first row always": lambda *a: step(*a, row=lambda upper, i: upper[0]),
        "a column left out": lambda *a: step(*a, first=2),
        "the diagonal of the inverse": lambda *a: step(*a, row=lambda upper, i: (upper.T @ upper)[i]),
        "cut off": lambda *a: step(*a, nearest=torch.floor),
        "in place": lambda *a: step(*a, inplace=True),
        "one scale for all": lambda w, u, i, s: step(w, u, i, s.mean().expand_as(s)),
        "only the column": lambda *a: step(*a)[:, a[2]],
    },
    "salient_scales": {
        "plain rounding": power(0.0),
        "in full proportion": power(1.0),
        "upside down": power(-0.5),
        "squares": power(2.0),
        "a little": power(0.05),
        "by the weights": lambda w, x, e: w.abs().mean(0) ** 0.5,
        "per output": lambda w, x, e: torch.ones_like(w[:, 0]),
        "zeros": lambda w, x, e: torch.zeros_like(w[0]),
        "alpha alone": lambda w, x, e: 0.5,
        "one scale for all": lambda w, x, e: x.abs().mean().expand(w.shape[1]),
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for function in RIGHT[name]:
        result = getattr(check, name)(function)
        assert result.solved, result.message


@pytest.mark.parametrize(("name", "mistake"), [(name, mistake) for name in WRONG for mistake in WRONG[name]])
def test_wrong(name, mistake):
    result = getattr(check, name)(WRONG[name][mistake])
    assert result.status in ("wrong", "error"), result.message
    assert "\nHint " in result.message
