"""The flat arrays for kernels: the mask comes back from them, and no mask is stored twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.patterns import BlockSparsePattern, Causal, LocalWindow, Strided, TileCsr, TileKind, tile_csr
from vllm_teach.errors import InvalidArgumentError


def rebuilt(csr: TileCsr, q_len: int, kv_len: int, tile_q: int, tile_k: int) -> torch.Tensor:
    """The mask as a kernel sees it, padded to whole tiles."""
    mask = torch.zeros(-(-q_len // tile_q) * tile_q, -(-kv_len // tile_k) * tile_k, dtype=torch.bool)
    for i in range(len(csr.row_ptr) - 1):
        for entry in range(int(csr.row_ptr[i]), int(csr.row_ptr[i + 1])):
            j = int(csr.k_tile[entry])
            tile = mask[i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
            if csr.kind[entry] == TileKind.FULL:
                assert csr.mask_index[entry] == -1
                tile[: q_len - i * tile_q, : kv_len - j * tile_k] = True
            else:
                tile[:] = csr.masks[csr.mask_index[entry]].bool()
    return mask


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_round_trip(data, patterns, lengths, tiles, mask_by_definition) -> None:
    pattern, (q_len, kv_len), (tile_q, tile_k) = data.draw(patterns), data.draw(lengths), data.draw(tiles)
    csr = tile_csr(pattern, q_len, kv_len, tile_q, tile_k)

    mask = rebuilt(csr, q_len, kv_len, tile_q, tile_k)
    assert torch.equal(mask[:q_len, :kv_len], mask_by_definition(pattern, q_len, kv_len))
    assert not mask[q_len:].any()
    assert not mask[:, kv_len:].any()

    assert [array.dtype for array in csr] == [torch.int32, torch.int32, torch.int8, torch.int32, torch.uint8]
    assert all(array.is_contiguous() for array in csr)
    assert csr.masks.shape[1:] == (tile_q, tile_k)
    assert len({array.numpy().tobytes() for array in csr.masks}) == len(csr.masks)
    assert set(csr.mask_index.tolist()) - {-1} == set(range(len(csr.masks)))
    kinds = pattern.tile_map(q_len, kv_len, tile_q, tile_k)
    assert torch.equal(csr.kind, kinds[kinds != TileKind.EMPTY])
    for start, end in zip(csr.row_ptr.tolist(), csr.row_ptr.tolist()[1:], strict=False):
        assert csr.k_tile[start:end].tolist() == sorted(set(csr.k_tile[start:end].tolist()))


def test_masks_are_shared() -> None:
    assert len(tile_csr(LocalWindow(511), 4096, 4096, 128, 128).masks) == 2
    assert len(tile_csr(BlockSparsePattern.random(16, 256, density=0.3) & Causal(), 4096, 4096, 128, 64).masks) == 2
    assert len(tile_csr(Strided(64) & Causal(), 2048, 2048, 64, 64).masks) == 1


def test_a_mask_on_a_diagonal_is_looked_at_once(monkeypatch) -> None:
    seen = []
    original = Strided.sees_ahead
    monkeypatch.setattr(Strided, "sees_ahead", lambda self, ahead: seen.append(ahead.numel()) or original(self, ahead))
    csr = tile_csr(Strided(63), 2048, 2048, 64, 64)
    assert len(csr.k_tile) == 32 * 32
    assert sum(seen) == 63 * 64 * 64 + (2 * 2048 - 1)  # 63 diagonals of tiles, and the tile map's line


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tile_k is 0"):
        tile_csr(Causal(), 4, 4, 2, 0)
    with pytest.raises(InvalidArgumentError, match="kv_len is 9"):
        tile_csr(BlockSparsePattern([[1]], 8), 9, 9, 2, 2)
