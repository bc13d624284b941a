"""Compare a learner's answer with the expected one and say in one line where they part."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch


@dataclass(frozen=True)
class Judged:
    """An expected answer where many are right: `problem(got)` says in one line what is wrong with one, or is None."""

    problem: Callable[[Any], str | None]


def difference(expected: Any, got: Any, *, rtol: float, atol: float) -> str | None:
    """Return None when `got` is right, else one line: what was expected, what came.

    expected: a tensor (shape and dtype must match; infinities match themselves, NaN matches nothing), an int, a float,
    a tuple of these, or a Judged. A plain number may also come as a 0-d tensor or a numpy scalar.
    """
    if isinstance(expected, Judged):
        return expected.problem(got)
    if isinstance(expected, tuple):
        return _tuple_difference(expected, got, rtol, atol)
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, got, rtol, atol)
    return _number_difference(expected, got, rtol, atol)


def _tuple_difference(expected: tuple[Any, ...], got: Any, rtol: float, atol: float) -> str | None:
    if not isinstance(got, tuple | list):
        return f"expected a tuple of {len(expected)} values, got {_kind(got)}"
    if len(got) != len(expected):
        return f"expected a tuple of {len(expected)} values, got {len(got)}"
    for position, (wanted, given) in enumerate(zip(expected, got, strict=True), start=1):
        found = difference(wanted, given, rtol=rtol, atol=atol)
        if found is not None:
            return f"value {position} of {len(expected)}: {found}"
    return None


def _tensor_difference(expected: torch.Tensor, got: Any, rtol: float, atol: float) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"expected a tensor of shape {list(expected.shape)}, got {_kind(got)}"
    got = got.detach().cpu()
    if got.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, got {list(got.shape)}"
    if got.dtype != expected.dtype:
        return f"expected dtype {_dtype(expected)}, got {_dtype(got)}"
    close = torch.isclose(got, expected, rtol=rtol, atol=atol) if got.is_floating_point() else got == expected
    if bool(close.all()):
        return None
    first = tuple(int(i) for i in torch.nonzero(~close)[0])
    place = f" at {list(first)}" if first else ""
    wrong = int((~close).sum())
    wanted, given = _two_numbers(expected[first], got[first])
    return f"first difference{place}: expected {wanted}, got {given} ({wrong} of {expected.numel()} elements differ)"


def _number_difference(expected: float, got: Any, rtol: float, atol: float) -> str | None:
    if hasattr(got, "item") and tuple(getattr(got, "shape", (None,))) == ():  # a 0-d tensor or a numpy scalar
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, Real):
        return f"expected a number, got {_kind(got)}"
    value = float(got)
    right = (
        value == expected if isinstance(expected, int) else math.isclose(value, expected, rel_tol=rtol, abs_tol=atol)
    )
    if right:
        return None
    wanted, given = _two_numbers(expected, got)
    return f"expected {wanted}, got {given}"


def same(first: Any, second: Any) -> bool:
    """True when two arguments are equal bit for bit (NaN equals NaN); tells whether a function changed its inputs."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
            and bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())
        )
    if isinstance(first, tuple | list):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(same(a, b) for a, b in zip(first, second, strict=True))
        )
    return bool(first == second)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    article = "an" if type(value).__name__[0] in "aeiou" else "a"
    return f"{article} {type(value).__name__}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _two_numbers(first: Any, second: Any) -> tuple[str, str]:
    """Return two different numbers with the fewest digits, from six on, that tell them apart."""
    texts = [(_number(first, digits), _number(second, digits)) for digits in (6, 9, 17)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[-1])


def _number(value: Any, digits: int) -> str:
    value = value.item() if isinstance(value, torch.Tensor) else value
    return f"{value:.{digits}g}" if isinstance(value, float) and not float(value).is_integer() else f"{value}"
