"""Checks of lesson 09: the grid of a group, AutoAWQ's order of nibbles, GPTQ's step, scales for salient inputs."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_teach.quantization.rounding import quantize_rtn
from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check

LESSON = "09_quantization"


def _grid(weights: Tensor, bits: int) -> tuple[float, int]:
    low, high = min(0.0, float(weights.min())), max(0.0, float(weights.max()))
    if low == high:
        return 1.0, 0
    scale = (high - low) / (2**bits - 1)
    return scale, round(-low / scale)


def _grid_cases(generator: torch.Generator) -> Iterator[Case]:
    def case(label: str, weights: list[float], bits: int, rule: str) -> Case:
        group = torch.tensor(weights, dtype=torch.float64)
        return Case(label, (group, bits), _grid(group, bits), rule)

    rule = "2^bits points have 2^bits - 1 steps between them: the scale is the range over the steps."
    yield case("four weights in 2 bits", [-0.9, -0.2, 0.1, 0.6], 2, rule)
    yield case("the same in 4 bits", [-0.9, -0.2, 0.1, 0.6], 4, rule)
    rule = "The zero is the code of 0: so many steps above the lowest point, rounded to a whole number."
    yield case("mostly negative", [-3.1, -0.5, 0.2], 3, rule)
    yield case("mostly positive", [-0.4, 2.0, 2.2, 1.1], 3, rule)
    rule = "0 must be on the grid: where all weights lie on one side of 0, the range is stretched to reach it."
    yield case("all positive", [0.5, 0.7, 1.5], 2, rule)
    yield case("all negative", [-0.5, -0.7, -1.5], 2, rule)
    rule = "A group of zeros has a range without extent: any scale will do, and dividing by 0 will not. Take 1 and 0."
    yield case("all zero", [0.0, 0.0], 4, rule)
    rule = "The same holds for any weights and any number of bits."
    for bits in (2, 3, 4, 8):
        weights = torch.randn(16, generator=generator, dtype=torch.float64)
        yield case(f"16 weights at random, {bits} bits", weights.tolist(), bits, rule)


def _pack(codes: list[int]) -> int:
    word = sum(codes[channel] << (4 * nibble) for nibble, channel in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return word - 2**32 if word >= 2**31 else word


def _pack_cases(generator: torch.Generator) -> Iterator[Case]:
    def case(label: str, codes: list[int], rule: str) -> Case:
        return Case(label, (codes,), _pack(codes), rule)

    rule = "Nibble i, counted from the lowest four bits, takes bits 4i to 4i + 3: shift its code left by 4i."
    yield case("channel 0 alone", [5, 0, 0, 0, 0, 0, 0, 0], rule)
    rule = "The nibbles hold the channels 0, 2, 4, 6, 1, 3, 5, 7, from the lowest: channel 1 is the fifth of them."
    yield case("channel 2 alone", [0, 0, 3, 0, 0, 0, 0, 0], rule)
    yield case("channel 1 alone", [0, 9, 0, 0, 0, 0, 0, 0], rule)
    yield case("channel 3 alone", [0, 0, 0, 6, 0, 0, 0, 0], rule)
    yield case("counting up", list(range(8)), rule)
    rule = "An int32 has a sign: from 2^31 on a word stands for a negative number, 2^32 less."
    yield case("channel 7 alone, its highest bit", [0, 0, 0, 0, 0, 0, 0, 8], rule)
    yield case("all ones", [15] * 8, rule)
    rule = "Eight codes are one word, whatever they are."
    for number in range(4):
        codes = torch.randint(0, 16, (8,), generator=generator).tolist()
        yield case(f"codes at random {number}", codes, rule)


def _step(weight: Tensor, upper: Tensor, i: int, scale: Tensor) -> Tensor:
    """By the definition, with a solver: what is left of H after column i decides the correction, not its factor."""
    rounded = (weight[:, i] / scale).round() * scale
    inverse = upper[i:, i:].T @ upper[i:, i:]  # of the Hessian of the columns that are left
    result = weight.clone()
    result[:, i] = rounded
    correction = torch.linalg.solve(torch.linalg.inv(inverse)[1:, 1:], torch.linalg.inv(inverse)[1:, :1])  # [rest, 1]
    result[:, i + 1 :] += (weight[:, i] - rounded)[:, None] * correction.T
    return result


def _step_cases(generator: torch.Generator) -> Iterator[Case]:
    def case(label: str, rows: int, inputs: int, i: int, rule: str, mixed: float = 1.0) -> Case:
        mix = torch.eye(inputs, dtype=torch.float64) + mixed * torch.randn(
            inputs, inputs, generator=generator, dtype=torch.float64
        )
        x = torch.randn(64, inputs, generator=generator, dtype=torch.float64) @ mix
        hessian = 2 * x.T @ x / 64 + 0.01 * torch.eye(inputs, dtype=torch.float64)
        upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
        weight = 3 * torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
        scale = 0.3 + torch.rand(rows, generator=generator, dtype=torch.float64)
        return Case(label, (weight, upper, i, scale), _step(weight, upper, i, scale), rule)

    rule = "Column i becomes round(w / scale) * scale, each row with its own scale."
    yield case("inputs hardly correlated", 2, 3, 0, rule, mixed=0.01)
    rule = "A later column j changes by minus the error of column i times upper[i, j] / upper[i, i]."
    yield case("two inputs", 1, 2, 0, rule)
    yield case("five inputs, the first column", 3, 5, 0, rule)
    rule = "Columns before i are rounded already and stay; only those behind i are mended."
    yield case("five inputs, the third column", 3, 5, 2, rule)
    rule = "Behind the last column there is nothing to mend: it is rounded to nearest."
    yield case("the last column", 3, 5, 4, rule)
    rule = "The same holds for any matrix: the error is outer-multiplied with row i of the factor, behind its diagonal."
    for number in range(3):
        yield case(f"at random {number}", 4, 6, 1 + number, rule)


ASKED, BITS, GROUP = 0.7, 3, 16


def output_error(weight: Tensor, scales: Tensor, inputs: Tensor) -> float:
    """The mean squared error of the outputs when `weight * scales` is rounded and the inputs are divided by `scales`.

    `weight` `[out, in]`, `scales` `[in]`, `inputs` `[tokens, in]`; 3 bits, groups of 16.
    """
    rounded = quantize_rtn(weight * scales, BITS, group_size=GROUP).dequantize().to(weight) / scales
    return float((inputs @ (rounded - weight).T).square().mean())


def _salient(generator: torch.Generator, loud: float, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weight [24, 64], inputs [128, 64], other inputs): a few input channels are `loud` times the others."""
    sizes = torch.exp(0.4 * torch.randn(64, generator=generator, dtype=torch.float64))
    sizes[torch.randperm(64, generator=generator)[:number]] *= loud
    weight = torch.randn(24, 64, generator=generator, dtype=torch.float64)
    seen, held = (torch.randn(128, 64, generator=generator, dtype=torch.float64) * sizes for _ in "12")
    return weight, seen, held


def _scales_problem(weight: Tensor, held: Tensor, got: Any) -> str | None:
    if not isinstance(got, Tensor) or got.shape != weight.shape[1:]:
        return f"expected a tensor with a scale for each of {weight.shape[1]} inputs, got {type(got).__name__}"
    if not bool((got.isfinite() & (got > 0)).all()):
        return "a scale is 0, negative or not finite: the inputs are divided by it"
    plain = output_error(weight, torch.ones_like(weight[0]), held)
    mine = output_error(weight, got.to(weight), held)
    if mine <= ASKED * plain:
        return None
    return f"on other inputs the error is {mine / plain:.2f} of plain rounding's; at most {ASKED} is asked for"


def _scales_cases(generator: torch.Generator) -> Iterator[Case]:
    rules = {
        (30.0, 2): "Few channels are loud: the larger a channel's scale, the smaller its error, as long as the group's "
        "range hardly grows.",
        (8.0, 4): "A scale stretches its whole group's range: too large a one costs the quiet channels more than the "
        "loud one gains.",
        (100.0, 1): "The louder the channel the more it pays, but scales in full proportion overdo it.",
        (15.0, 8): "With many loud channels the power of the magnitudes matters: measure the error for several.",
    }
    for (loud, number), rule in rules.items():
        weight, seen, held = _salient(generator, loud, number)
        judge = Judged(functools.partial(_scales_problem, weight, held))
        yield Case(f"{number} of 64 channels {loud:g} times as loud", (weight, seen, output_error), judge, rule)


CHECKS = [
    Check(
        name="grid_of_group",
        lesson=LESSON,
        task="Return (scale, zero) of the grid for a group of weights: 2^bits points from the smallest to the largest "
        "weight, with 0 among them; zero is the code of 0, a whole number.",
        lesson_learnt="A grid is two numbers a group; its range is set by the group's two most extreme weights.",
        cases=_grid_cases,
        hints=(
            "low = min(0, smallest), high = max(0, largest).",
            "scale = (high - low) / (2 ** bits - 1), and zero = round(-low / scale).",
            "When low == high there is nothing to divide by: return 1.0 and 0.",
        ),
        rtol=1e-7,
    ),
    Check(
        name="pack_awq_word",
        lesson=LESSON,
        task="Return the int32 word, as a Python int, that holds eight 4-bit codes, of the output channels 0 to 7, in "
        "AutoAWQ's order.",
        lesson_learnt="A format is an order of bits that writer and reader agree on: nothing in the file says it.",
        cases=_pack_cases,
        hints=(
            "From the lowest nibble up stand the channels 0, 2, 4, 6, 1, 3, 5, 7.",
            "word |= codes[channel] << (4 * nibble), for each nibble and its channel.",
            "If the word is 2 ** 31 or more, the int32 is word - 2 ** 32.",
        ),
    ),
    Check(
        name="gptq_step",
        lesson=LESSON,
        task="Return the weights after GPTQ's step on column i: column i rounded to multiples of each row's scale, the "
        "columns behind it mended by row i of the factor.",
        lesson_learnt="What one column's rounding breaks, the columns behind it can largely mend.",
        cases=_step_cases,
        hints=(
            "rounded = (weight[:, i] / scale).round() * scale.",
            "error = (weight[:, i] - rounded) / upper[i, i], one number a row.",
            "result[:, i + 1:] -= error[:, None] * upper[i, i + 1:]. Work on a clone.",
        ),
        rtol=1e-6,
        atol=1e-8,
    ),
    Check(
        name="salient_scales",
        lesson=LESSON,
        task="Return a scale above 0 for each input channel. Rounded to 3 bits, weight * scales must err on other "
        f"inputs, divided by scales, at most {ASKED} times what plain rounding errs.",
        lesson_learnt="Which weights matter is not in the weights: it is in what they are multiplied with.",
        cases=_scales_cases,
        hints=(
            "magnitudes = inputs.abs().mean(0) says which channels are loud. All ones is plain rounding.",
            "Try magnitudes ** alpha. output_error(weight, scales, inputs) tells what it costs.",
            "Search alpha over 0, 0.05, … 0.95 and return the scales with the least error.",
        ),
    ),
]
