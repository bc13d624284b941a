"""The last rows of many matrices at once, against the tiles of each matrix."""

import pytest
import torch
from hypothesis import given, settings
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
    tile_csr,
)
from vllm_teach.attention.patterns.last_rows import last_rows
from vllm_teach.errors import InvalidArgumentError

PATTERNS = (
    Causal(),
    LocalWindow(5),
    GlobalTokens(3) | LocalWindow(6),
    Causal() & Strided(4),
    ~LocalWindow(9),
    Banded(3, 5) & Causal(),
    Documents([0, 7, 7, 30, 60]) & Causal(),
    LocalWindow(0) & GlobalTokens(2),  # soon nothing
)


@given(st.sampled_from(PATTERNS), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_each_row_is_that_of_its_own_matrix(pattern: Pattern, lengths: list[int], tile_q: int, tile_k: int) -> None:
    found = last_rows(pattern, lengths, tile_q, tile_k)
    assert len(found.row_ptr) == len(lengths) + 1
    for i, kv_len in enumerate(lengths):
        alone = tile_csr(pattern, 1, kv_len, tile_q, tile_k)
        rows = slice(*found.row_ptr[i : i + 2].tolist())
        assert torch.equal(found.k_tile[rows], alone.k_tile)
        assert torch.equal(found.kind[rows], alone.kind)
        for ours, theirs in zip(found.mask_index[rows].tolist(), alone.mask_index.tolist(), strict=True):
            assert (ours == -1) == (theirs == -1)
            if ours >= 0:
                assert torch.equal(found.masks[ours], alone.masks[theirs])
    assert [part.dtype for part in found] == [part.dtype for part in tile_csr(Causal(), 1, 1, 1, 1)]


def test_a_pattern_that_is_not_defined_there_is_refused() -> None:
    pattern = BlockSparsePattern(torch.ones(2, 2, dtype=torch.bool), 4)
    assert last_rows(pattern, [8, 3], 1, 4).row_ptr.tolist() == [0, 2, 3]
    with pytest.raises(InvalidArgumentError):
        last_rows(pattern, [3, 9], 1, 4)
    with pytest.raises(InvalidArgumentError, match="tile_k"):
        last_rows(pattern, [3], 1, 0)
