from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from vllm_teach.attention.patterns import (
    Banded,
    BlockSparsePattern,
    Causal,
    Documents,
    GlobalTokens,
    LocalWindow,
    Pattern,
    Strided,
)
from vllm_teach.attention.patterns.base import Both, Either, Hidden

LONGEST = 40


def _sees(pattern: Pattern, query: int, key: int) -> bool:
    """What the patterns' docstrings say, for one pair of positions, in plain Python."""
    match pattern:
        case Causal():
            return key <= query
        case LocalWindow(left, right):
            return (left == -1 or key >= query - left) and (right == -1 or key <= query + right)
        case Banded(width, dilation):
            return key in [query + step * dilation for step in range(-width, width + 1)]
        case Strided(stride):
            return abs(query - key) % stride == 0
        case GlobalTokens(n, True):
            return key in range(n) or query in range(n)
        case GlobalTokens(n, False):
            return key in range(n) and key <= query
        case Documents(cu_seqlens):
            documents = [range(start, end) for start, end in pairwise(cu_seqlens)]
            return any(query in document and key in document for document in documents)
        case BlockSparsePattern(layout, block):
            return query >= 0 and layout[query // block][key // block]
        case Both(a, b):
            return _sees(a, query, key) and _sees(b, query, key)
        case Either(a, b):
            return _sees(a, query, key) or _sees(b, query, key)
        case Hidden(a):
            return not _sees(a, query, key)
    raise AssertionError(f"no definition of {pattern!r}")


@pytest.fixture(scope="session")
def mask_by_definition() -> Callable[[Pattern, int, int], torch.Tensor]:
    def mask(pattern: Pattern, q_len: int, kv_len: int) -> torch.Tensor:
        rows = [[_sees(pattern, i + kv_len - q_len, j) for j in range(kv_len)] for i in range(q_len)]
        return torch.tensor(rows, dtype=torch.bool).view(q_len, kv_len)

    return mask


@pytest.fixture(scope="session")
def patterns() -> st.SearchStrategy[Pattern]:
    """Every pattern, and compositions of them, defined for up to 40 keys."""

    def documents(lengths: list[int]) -> Documents:
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return Documents([*starts, max(LONGEST, starts[-1])])

    def blocks(block: int, bits: int) -> BlockSparsePattern:
        count = -(-LONGEST // block)
        return BlockSparsePattern(
            [[bits >> ((i * count + j) % 61) & 1 for j in range(count)] for i in range(count)], block
        )

    size = st.integers(0, 12)
    simple = st.one_of(
        st.just(Causal()),
        st.builds(LocalWindow, st.integers(-1, 12), st.integers(-1, 12)),
        st.builds(Banded, size, st.integers(1, 4)),
        st.builds(Strided, st.integers(1, 7)),
        st.builds(GlobalTokens, size, st.booleans()),
        st.lists(size, max_size=6).map(documents),
        st.builds(blocks, st.integers(3, 17), st.integers(0, 2**61 - 1)),
    )

    def combined(parts: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
        return st.one_of(
            st.tuples(parts, parts).map(lambda pair: pair[0] & pair[1]),
            st.tuples(parts, parts).map(lambda pair: pair[0] | pair[1]),
            parts.map(lambda part: ~part),
        )

    return st.recursive(simple, combined, max_leaves=4)


@pytest.fixture(scope="session")
def lengths() -> st.SearchStrategy[tuple[int, int]]:
    """(q_len, kv_len), either of them also 0, and q_len also above kv_len."""
    return st.tuples(st.integers(0, 45), st.integers(0, LONGEST))


@pytest.fixture(scope="session")
def tiles() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, 17), st.integers(1, 17))
