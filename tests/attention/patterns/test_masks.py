"""Every pattern's mask, tile map and density against its definition, pair by pair."""

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
    TileKind,
    tile_csr,
)
from vllm_teach.attention.patterns.tiles import Spans


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_masks_agree_with_the_definition(data, patterns, lengths, mask_by_definition) -> None:
    pattern, (q_len, kv_len) = data.draw(patterns), data.draw(lengths)
    expected = mask_by_definition(pattern, q_len, kv_len)
    assert torch.equal(pattern.mask(q_len, kv_len), expected)

    rows = sorted(data.draw(st.tuples(st.integers(0, q_len), st.integers(0, q_len))))
    keys = sorted(data.draw(st.tuples(st.integers(0, kv_len), st.integers(0, kv_len))))
    piece = pattern.tile_mask(tuple(rows), tuple(keys), kv_len - q_len)
    assert torch.equal(piece, expected[slice(*rows), slice(*keys)])

    q_pos, k_pos = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)[None, :]
    assert torch.equal(pattern.sees(q_pos, k_pos), expected)
    assert torch.equal(pattern.rule(torch.device("cpu"))(q_pos, k_pos), expected)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_tile_maps_are_exact(data, patterns, lengths, tiles, mask_by_definition) -> None:
    pattern, (q_len, kv_len), (tile_q, tile_k) = data.draw(patterns), data.draw(lengths), data.draw(tiles)
    expected = mask_by_definition(pattern, q_len, kv_len)
    found = pattern.tile_map(q_len, kv_len, tile_q, tile_k)
    assert found.dtype == torch.int8
    assert found.shape == (-(-q_len // tile_q), -(-kv_len // tile_k))
    for i, row in enumerate(found.tolist()):
        for j, kind in enumerate(row):
            tile = expected[i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
            assert kind == (TileKind.FULL if tile.all() else TileKind.PARTIAL if tile.any() else TileKind.EMPTY)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_densities_agree_with_the_definition(data, patterns, lengths, mask_by_definition) -> None:
    pattern, (q_len, kv_len) = data.draw(patterns), data.draw(lengths)
    seen = int(mask_by_definition(pattern, q_len, kv_len).sum())
    assert pattern.density(q_len, kv_len) == (seen / (q_len * kv_len) if q_len * kv_len else 0)


@pytest.mark.parametrize(
    "pattern",
    [
        GlobalTokens(5) | LocalWindow(100),
        Documents([0, 130, 131, 300]) & Causal(),
        BlockSparsePattern.random(5, 64, density=0.5) & Causal(),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (129, 257), (290, 130)])
def test_density_over_many_counting_tiles(pattern, q_len, kv_len) -> None:
    assert pattern.density(q_len, kv_len) == int(pattern.mask(q_len, kv_len).sum()) / (q_len * kv_len)


SINGLE = [
    Causal(),
    LocalWindow(3, 2),
    LocalWindow(-1, 4),
    Banded(2, 3),
    Strided(4),
    GlobalTokens(5),
    GlobalTokens(5, symmetric=True),
    Documents([0, 3, 3, 17, 40]),
    BlockSparsePattern.random(8, 5, density=0.4, seed=1),
    BlockSparsePattern.random(8, 5, density=0.4, seed=2, causal=False),
]


@pytest.mark.parametrize("pattern", SINGLE, ids=repr)
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 40), (7, 33), (45, 20)])
@pytest.mark.parametrize(("tile_q", "tile_k"), [(1, 1), (4, 6), (16, 3), (64, 64)])
def test_single_patterns_know_each_tile_without_a_look(pattern, q_len, kv_len, tile_q, tile_k) -> None:
    found = pattern.classify(Spans.cut(q_len, tile_q, kv_len - q_len), Spans.cut(kv_len, tile_k, 0))
    assert torch.equal(found, pattern.tile_map(q_len, kv_len, tile_q, tile_k))


@pytest.mark.parametrize("pattern", SINGLE, ids=repr)
@pytest.mark.parametrize("first", [-30, -8, -1, 0, 5, 31, 60])
@pytest.mark.parametrize("tile", [1, 7, 20])
def test_single_patterns_know_tiles_of_queries_anywhere(pattern, first, tile) -> None:
    found = pattern.classify(Spans.cut(20, tile, first), Spans.cut(40, 6, 0))
    mask = pattern.sees(torch.arange(first, first + 20)[:, None], torch.arange(40)[None, :])
    tiles = [[mask[i : i + tile, j : j + 6] for j in range(0, 40, 6)] for i in range(0, 20, tile)]
    assert found.tolist() == [[2 if tile.all() else 1 if tile.any() else 0 for tile in row] for row in tiles]


def test_the_window_of_the_articles_looks_at_no_pair(monkeypatch) -> None:
    pattern, seen = LocalWindow(511), []
    original = LocalWindow.sees_ahead
    monkeypatch.setattr(
        LocalWindow, "sees_ahead", lambda self, ahead: seen.append(ahead.numel()) or original(self, ahead)
    )
    found = pattern.tile_map(8192, 8192, 128, 128)
    pattern.density(8192, 8192)
    # 5 tiles a row, but for the first four rows; those of the two edges are cut
    assert int((found != TileKind.EMPTY).sum()) == 64 * 5 - 10
    assert int((found == TileKind.FULL).sum()) == 60 * 3 + 3 + 2 + 1
    assert sum(seen) == 2 * (2 * 8192 - 1)  # one answer a diagonal, twice, and not 8192²


def test_attention_sinks_are_causal_and_five_hundred_and_sixteen_wide() -> None:
    mask = (GlobalTokens(4) | LocalWindow(511)).mask(1000, 1000)
    assert not mask.triu(1).any()
    assert mask[600].nonzero().flatten().tolist() == [0, 1, 2, 3, *range(600 - 511, 601)]
    assert mask[2].nonzero().flatten().tolist() == [0, 1, 2]


def test_the_sparse_transformers_strided_attention() -> None:
    mask = ((Strided(4) | LocalWindow(4)) & Causal()).mask(12, 12)
    assert mask[11].nonzero().flatten().tolist() == [3, 7, 8, 9, 10, 11]


def test_a_decode_step_is_the_last_row_of_the_prefill() -> None:
    for pattern in (GlobalTokens(4) | LocalWindow(7), Documents([0, 11, 40]) & Causal(), SINGLE[-2] & Causal()):
        assert torch.equal(pattern.mask(1, 40), pattern.mask(40, 40)[-1:])


def test_what_is_ahead_of_the_sequence_belongs_to_nothing() -> None:
    for pattern in (Documents([0, 3, 9]), BlockSparsePattern([[True, True], [True, True]], 5)):
        mask = pattern.mask(13, 9)
        assert not mask[:4].any()
        assert mask[4].any()


def test_positions_that_nothing_covers_see_nothing_not_even_each_other() -> None:
    outside = torch.tensor([-7, -1, 10, 99])
    for pattern in (Documents([0, 3, 10]), BlockSparsePattern([[True, True], [True, True]], 5)):
        assert not pattern.sees(outside[:, None], outside[None, :]).any()
        assert not pattern.sees(outside, torch.tensor(4)).any()
        assert not pattern.sees(torch.tensor(4), outside).any()
        assert pattern.sees(torch.tensor(4), torch.tensor(9))


class PrimeDistance(Pattern):
    """A pattern that somebody tries out: nothing but its rule."""

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        return torch.isin(q_pos - k_pos, torch.tensor([2, 3, 5, 7, 11, 13]))


def test_a_rule_is_all_that_a_new_pattern_needs() -> None:
    pattern = (PrimeDistance() | LocalWindow(2)) & ~PrimeDistance()
    mask = pattern.mask(20, 30)
    assert mask[-1].nonzero().flatten().tolist() == [28, 29]
    tiles = [[mask[i : i + 4, j : j + 5] for j in range(0, 30, 5)] for i in range(0, 20, 4)]
    kinds = [[2 if tile.all() else 1 if tile.any() else 0 for tile in row] for row in tiles]
    assert pattern.tile_map(20, 30, 4, 5).tolist() == kinds
    assert pattern.density(20, 30) == pytest.approx(float(mask.double().mean()))


def test_what_is_remembered_from_inference_serves_training() -> None:
    pattern = Documents([0, 5, 11]) & BlockSparsePattern([[1, 0], [1, 1]], 6)
    with torch.inference_mode():
        found, csr = pattern.tile_map(11, 11, 3, 3), tile_csr(pattern, 11, 11, 3, 3)
    assert not found.is_inference()
    assert not any(array.is_inference() for array in csr)
    weights = torch.rand(11, 11, requires_grad=True)
    (weights * pattern.mask(11, 11)).sum().backward()
    assert torch.equal(weights.grad > 0, pattern.mask(11, 11))
