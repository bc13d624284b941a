"""Checks of what a user sets: each raises InvalidArgumentError with the field's name, its value and what to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_teach.engine.failure import shown
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def refuse(name: str, value: object, hint: str) -> NoReturn:
    """Raise InvalidArgumentError: "`name`=`value` is not valid: `hint`."."""
    raise InvalidArgumentError(f"{name}={shown(value)} is not valid: {hint}.")


def take_plain_numbers(settings: DataclassInstance) -> None:
    """Replace the numbers in the fields of `settings` by Python's own: NumPy's int8, say, overflows in a sum."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if type(value) in (bool, int, float):
            continue
        if is_whole(value):
            object.__setattr__(settings, each.name, int(value))
        elif is_within(value):
            object.__setattr__(settings, each.name, float(value))


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number (a bool is none)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_within(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether `value` is a finite number (a bool is none) from `low` to `high`, both included."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and low <= float(value) <= high
    except OverflowError:  # a whole number beyond float64
        return False


def check_whole(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, hint: str = "") -> None:
    """Refuse what is no whole number from `low` to `high`; without `hint` the message says from where."""
    if not is_whole(value) or not low <= value <= high:
        refuse(name, value, hint or "use a whole number" + ("" if low == -math.inf else f" from {low}"))


def check_seed(value: Any, hint: str = "use a whole number of at most 64 bits") -> None:
    """Refuse a `seed` that is no whole number of 64 bits, with or without sign."""
    check_whole("seed", value, -(2**63), 2**64 - 1, hint=hint)


def check_number(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    hint: str,
) -> None:
    """Refuse what is no finite number from `low` to `high`, or is an end that is open."""
    if not is_within(value, low, high) or (open_low and value == low) or (open_high and value == high):
        refuse(name, value, hint)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is not one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, f"use {' or '.join(map(repr, choices))}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        refuse(name, value, "use True or False")
