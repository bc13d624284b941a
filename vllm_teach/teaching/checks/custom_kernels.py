"""Checks of lesson 10: bytes of a fused residual sum, moments that merge, a row in a padded tile, a kernel's fault."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check, MadeAnew

LESSON = "10_custom_kernels"
FAULTS = ("none", "one pass", "unmasked padding", "n - 1", "no eps")
MOST_RUNS = 3
EPS = 1e-5


def _bytes_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "Each kernel reads what it is given and writes what it makes; weight and bias are read by the norm alone."
    sizes = [(1, 8, 4), (2048, 2048, 4), (2048, 2048, 2), (64, 576, 2), (7, 1000, 2)]
    sizes.append((*torch.randint(1, 5000, (2,), generator=generator).tolist(), 4))
    for rows, size, element in sizes:
        tensor, parameter = rows * size * element, size * element
        add = [tensor, tensor, tensor]  # x, residual; their sum
        norm = [tensor, parameter, parameter, tensor]  # the sum, weight, bias; the result
        fused = [tensor, tensor, parameter, parameter, tensor, tensor]  # x, residual, weight, bias; the sum, the result
        expected = sum(add) + sum(norm), sum(fused)
        yield Case(f"{rows:,} rows of {size:,}, {element} bytes each", (rows, size, element), expected, rule)


def _moments(values: Tensor) -> tuple[int, float, float]:
    """The moments of all values at once, in two passes."""
    if not len(values):
        return 0, 0.0, 0.0
    mean = values.mean()
    return len(values), mean.item(), (values - mean).square().sum().item()


def _merge_cases(generator: torch.Generator) -> Iterator[Case]:
    rule = "m2 of both parts, plus what their means differ by: (mean difference)^2 * n_left * n_right / n."
    parts = [
        ("one number each", [1.0], [3.0]),
        ("equal means", [1.0, 3.0], [0.0, 4.0]),
        ("three and one", [2.0, 4.0, 4.0], [10.0]),
        ("all the same number", [5.0, 5.0], [5.0]),
    ]
    for label, left, right in parts:
        yield _merge_case(label, torch.tensor(left).double(), torch.tensor(right).double(), rule)
    drawn = torch.randn(100, generator=generator).double()
    yield _merge_case("30 and 70 drawn numbers", drawn[:30], drawn[30:] * 3 + 2, rule)
    rule = "Numbers around 1e8: sums of squares have no digit left for the spread. Use the difference of the means."
    yield _merge_case("far from 0", drawn[:30] + 1e8, drawn[30:] + 1e8, rule)
    rule = "A part without a number changes nothing, and two of them are still none: beware of 0 / 0."
    empty = drawn[:0]
    yield _merge_case("nothing on the left", empty, drawn[:9], rule)
    yield _merge_case("nothing on the right", drawn[:9], empty, rule)
    yield _merge_case("nothing at all", empty, empty, rule)


def _merge_case(label: str, left: Tensor, right: Tensor, rule: str) -> Case:
    return Case(label, (_moments(left), _moments(right)), _moments(torch.cat([left, right])), rule)


class IllegalAddressError(Exception):
    """A load from memory that is not the tensor's."""


def loader(memory: Tensor) -> Callable[..., Tensor]:
    """Return load(offsets, mask=None, other=None), Triton's `tl.load` of `memory`, float64 `[elements]`.

    A lane whose mask is False gives `other`, or anything where none is told: NaN here. A lane that is let through
    beyond the memory raises IllegalAddressError, as a GPU would sooner or later.
    """

    def load(offsets: Tensor, mask: Tensor | None = None, other: float | None = None) -> Tensor:
        offsets = torch.as_tensor(offsets)
        through = torch.ones(offsets.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
        outside = through & ((offsets < 0) | (offsets >= len(memory)))
        if outside.any():
            raise IllegalAddressError(f"an illegal memory access: element {offsets[outside][0].item()}.")
        found = memory[offsets.clamp(0, len(memory) - 1)]
        return torch.where(through, found, torch.tensor(torch.nan if other is None else other).double())

    return load


def _tile_cases(generator: torch.Generator) -> Iterator[Case]:
    settings = [
        ("a row that fills the tile", 4, 8, 8, 8, 1),
        ("5 of 8 lanes", 3, 5, 5, 8, 0),
        ("576 of 1,024 lanes", 2, 576, 576, 1024, 1),
        ("one element", 3, 1, 1, 4, 2),
    ]
    rule = (
        "The variance divides by size, not by the tile, and a lane beyond the row must hold 0 when squares are summed."
    )
    for label, rows, size, stride, tile, row in settings:
        yield _tile_case(label, generator, rows, size, stride, tile, row, rule)
    rule = "Row r begins at r * row_stride: rows may lie apart, and between them is somebody else's memory."
    yield _tile_case("rows that lie apart", generator, 4, 6, 10, 8, 2, rule)
    rule = "The last row ends where the memory does: a lane beyond it must not be loaded at all."
    yield _tile_case("the last row", generator, 3, 5, 5, 8, 2, rule)


def _tile_case(
    label: str, generator: torch.Generator, rows: int, size: int, stride: int, tile: int, row: int, rule: str
) -> Case:
    memory = torch.full(((rows - 1) * stride + size,), 1e6, dtype=torch.float64)
    for r in range(rows):
        memory[r * stride : r * stride + size] = 3 + torch.randn(size, generator=generator).double()
    values = memory[row * stride : row * stride + size]
    expected = values.mean().item(), values.var(correction=0).item()
    return Case(f"{label}: row {row}", (loader(memory), row, stride, size, tile), expected, rule)


class RunLimitError(Exception):
    """More runs than the exercise allows."""


def kernel_with(fault: str) -> Callable[[list[float]], Tensor]:
    """Return normalise(row) with one of FAULTS, eps 1e-5, in float32, a row of 1 to 4,096 numbers in a padded tile.

    A closure: it has nothing to read. It raises RunLimitError beyond 3 calls.
    """
    runs = 0

    def normalise(row: list[float]) -> Tensor:
        nonlocal runs
        runs += 1
        if runs > MOST_RUNS:
            raise RunLimitError(f"{MOST_RUNS} runs are allowed: choose rows that tell several faults apart at once.")
        x = torch.as_tensor(row, dtype=torch.float32)
        size = len(x)
        tile = torch.zeros(1 << (size - 1).bit_length())
        tile[:size] = x
        mean = x.sum() / size
        centred = tile - mean
        if fault != "unmasked padding":
            centred[size:] = 0
        variance = centred.square().sum() / (size - 1 if fault == "n - 1" else size)
        if fault == "one pass":
            variance = x.square().sum() / size - mean * mean
        return centred[:size] * torch.rsqrt(variance + (0 if fault == "no eps" else EPS))

    return normalise


def _fault_cases(generator: torch.Generator) -> Iterator[Case]:
    rules = {
        "none": "A kernel without a fault passes every row; do not accuse it for its rounding.",
        "one pass": "Mean of squares less square of the mean: only a row far from 0 shows that it has cancelled.",
        "unmasked padding": "Only a size that is no power of two has padding, and only a mean far from 0 shows in it.",
        "n - 1": "Dividing by n - 1 shows best in the shortest rows.",
        "no eps": "eps shows where the variance is not far above it: in a row that hardly varies.",
    }
    order = torch.randperm(len(FAULTS), generator=generator).tolist()
    for number, index in enumerate(order, start=1):
        fault = FAULTS[index]
        arguments = (MadeAnew(partial(kernel_with, fault)),)
        yield Case(f"kernel {number} of {len(FAULTS)}", arguments, Judged(partial(_verdict, fault)), rules[fault])


def _verdict(fault: str, got: object) -> str | None:
    """What is wrong with the answer; which fault it is stays untold."""
    if got not in FAULTS:
        return f"expected one of {', '.join(map(repr, FAULTS))}, got {got!r}"
    return None if got == fault else f"this kernel's fault is not {got!r}"


CHECKS = [
    Check(
        name="residual_norm_bytes",
        lesson=LESSON,
        task="Return (bytes with two kernels, bytes with one): an addition and then a fused LayerNorm with weight and "
        "bias, or one kernel that does both. x and residual are rows x size; the sum is needed later and is written.",
        lesson_learnt="5 passes or 4: the sum is not read back. The gain is 1.25 however large the tensor is.",
        cases=_bytes_cases,
        hints=(
            "List what each kernel reads and what it writes: x, residual, their sum, weight, bias, the result.",
            "A tensor has rows * size * element_bytes bytes, the weight size * element_bytes, and the bias as many.",
            "The addition moves 3 tensors, the norm 2 and the parameters; one kernel moves 4 and the parameters.",
        ),
    ),
    Check(
        name="merge_moments",
        lesson=LESSON,
        task="Return (count, mean, m2) of two parts of a row together, each given as (count, mean, m2); m2 is the sum "
        "of the squared deviations from the part's own mean. A part may be empty: (0, 0.0, 0.0).",
        lesson_learnt="Threads can each take a part of a row and merge in any order, as with the states of lesson 02.",
        cases=_merge_cases,
        hints=(
            "Begin with the counts; return the other part where one is empty.",
            "mean = left mean + (right mean - left mean) * n_right / n.",
            "Each m2 was taken around its own mean. The common mean adds delta^2 * n_left * n_right / n.",
        ),
        rtol=1e-7,
    ),
    Check(
        name="row_moments",
        lesson=LESSON,
        task="Return (mean, variance) of row `row` as floats, in the manner of a Triton program: `tile` lanes at once, "
        "load(offsets, mask, other) as tl.load. Rows begin `row_stride` apart and have `size` elements.",
        lesson_learnt="Mask the load, and mask again after subtracting the mean: 0 - mean is no 0 any more.",
        cases=_tile_cases,
        hints=(
            "lanes = torch.arange(tile); the mask is lanes < size; lane i loads element row * row_stride + i.",
            "With other=0.0 the padding adds nothing to the sum: mean = x.sum() / size.",
            "x - mean is -mean in the padding: put 0 there with torch.where before you square.",
        ),
    ),
    Check(
        name="find_the_fault",
        lesson=LESSON,
        task="Return which fault the kernel normalise(row) has, one of "
        f"{', '.join(FAULTS)}, in at most {MOST_RUNS} runs. A row is a list of numbers; eps is 1e-5.",
        lesson_learnt="A test finds what its rows were made for. On 1,024 numbers around 0 all five look alike.",
        cases=_fault_cases,
        hints=(
            "For each fault: which row would come out wrong, and what would it be instead? Compute it with a pencil.",
            "[1.0, 2.0, 6.0] has padding (its tile has 4 lanes) and a mean of 3.",
            "[0.001, 0.003] has a variance of 1e-6, below eps, and two elements: it tells n - 1 and no eps apart.",
            "[4096.0, 4097.0] has squares beyond 2**24, where float32 counts by twos: 0.25 is lost in one pass.",
        ),
    ),
]
