"""A few rows that try every combination of any two settings: how to test many options without their whole product.

In a covering array of strength t, any t factors take together each combination of their values in some row. Most
failures need only one or two settings to come together (Kuhn, Wallace & Gallo 2004, "Software fault interactions"), and
the rows needed grow with the logarithm of the number of factors (Cohen et al. 1997, "The AETG system").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

from vllm_teach.errors import InvalidArgumentError

# Each factor's place in a row, and the place of its value among its values.
_Choice = tuple[tuple[int, int], ...]
_STARTS = 40  # rows that are built and compared for each one that is kept


def covering_array(factors: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Return rows, one value for each of `factors`, in which any `strength` factors take all combinations of values.

    Greedy: each row is the one, among those built around the first combinations that are still missing, that has the
    most missing ones. No random numbers: the same factors give the same rows. Raises InvalidArgumentError for a
    `strength` that is not from 1 to the number of factors, and for a factor without values.
    """
    if not 1 <= strength <= len(factors):
        raise InvalidArgumentError(f"strength={strength} is not valid: use a number from 1 to {len(factors)}.")
    for name, values in factors.items():
        if not values:
            raise InvalidArgumentError(f"factor {name!r} has no values: give at least one.")
    sizes = [len(values) for values in factors.values()]
    missing = _all_combinations(sizes, strength)
    rows: list[list[int]] = []
    while missing:
        starts = [start for _, start in zip(range(_STARTS), missing, strict=False)]
        row = max((_build_row(sizes, start, missing, strength) for start in starts), key=lambda row: row[1])[0]
        for choice in combinations(enumerate(row), strength):
            missing.pop(choice, None)
        rows.append(row)
    values = list(factors.values())
    return [
        {name: values[place][value] for place, (name, value) in enumerate(zip(factors, row, strict=True))}
        for row in rows
    ]


def _all_combinations(sizes: list[int], strength: int) -> dict[_Choice, None]:
    """Return every combination that some row must have, in a fixed order (a dict, as sets have none)."""
    return {
        tuple(zip(places, values, strict=True)): None
        for places in combinations(range(len(sizes)), strength)
        for values in product(*(range(sizes[place]) for place in places))
    }


def _build_row(
    sizes: list[int], start: _Choice, missing: Mapping[_Choice, None], strength: int
) -> tuple[list[int], int]:
    """Return a row that has `start`, and how many of the missing combinations it has.

    The other places follow in turn, from a place that depends on `start`; each takes the value that completes the most
    missing combinations with the places before it.
    """
    chosen = dict(start)
    gain = 1
    first = sum(place + value for place, value in start)
    for place in ((first + offset) % len(sizes) for offset in range(len(sizes))):
        if place in chosen:
            continue
        others = sorted(chosen.items())
        best, best_gain = 0, -1
        for offset in range(sizes[place]):
            value = (first + offset) % sizes[place]
            new = sum(tuple(sorted((*some, (place, value)))) in missing for some in combinations(others, strength - 1))
            if new > best_gain:
                best, best_gain = value, new
        chosen[place] = best
        gain += best_gain
    return [chosen[place] for place in range(len(sizes))], gain
