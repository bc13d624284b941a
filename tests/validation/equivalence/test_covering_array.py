from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.equivalence.configurations import FACTORS, list_configurations
from vllm_teach.validation.equivalence.covering_array import covering_array


def is_covered(factors, rows, strength: int) -> bool:
    """Look each combination up in all rows: slow and plain."""
    return all(
        any(all(row[name] == value for name, value in zip(names, values, strict=True)) for row in rows)
        for names in combinations(factors, strength)
        for values in product(*(factors[name] for name in names))
    )


def test_the_configurations_have_every_pair_in_at_most_24_rows() -> None:
    rows = [vars(each) for each in list_configurations()]
    assert is_covered(FACTORS, rows, 2)
    assert len(rows) <= 24


def test_a_missing_row_is_noticed() -> None:
    rows = [vars(each) for each in list_configurations()]
    assert not is_covered(FACTORS, rows[1:], 2)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_every_combination_is_covered(sizes: list[int], strength: int) -> None:
    strength = min(strength, len(sizes))
    factors = {f"factor {place}": [f"{place}.{value}" for value in range(size)] for place, size in enumerate(sizes)}
    rows = covering_array(factors, strength)
    assert is_covered(factors, rows, strength)
    least = max(1, *(a * b for a, b in combinations(sizes, 2))) if strength == 2 else 1
    assert least <= len(rows) <= len(list(product(*factors.values())))
    assert rows == covering_array(factors, strength)


@pytest.mark.parametrize("strength", [0, 3])
def test_a_strength_beyond_the_factors_is_refused(strength: int) -> None:
    with pytest.raises(InvalidArgumentError, match="strength"):
        covering_array({"a": (1, 2), "b": (1, 2)}, strength)


def test_a_factor_without_values_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'b' has no values"):
        covering_array({"a": (1, 2), "b": ()})
