from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.parallel.split import split


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 9))
def test_parts_cover_all_in_whole_units_and_are_even(total: int, parts: int, unit: int) -> None:
    units = -(-total // unit)
    if units < parts:
        with pytest.raises(InvalidArgumentError, match=f"total={total} .*too few for {parts} parts"):
            split(total, parts, unit)
        return
    found = split(total, parts, unit)
    assert [i for part in found for i in part] == list(range(total))
    assert all(part.start % unit == 0 for part in found)
    sizes = [-(-len(part) // unit) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert all(a >= b for a, b in pairwise(sizes)), "the larger ones first"


def test_smollm2s_heads() -> None:
    assert split(3, 2) == [range(0, 2), range(2, 3)]
    assert split(3, 3) == [range(0, 1), range(1, 2), range(2, 3)]
