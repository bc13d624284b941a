"""The bytes of the tiled forward have the form of FlashAttention's Theorem 2: n^2 d^2 / M (Dao et al. 2022, 3.2).

The theorem is about d <= M <= n d: a fast memory that holds a tile, and not the whole of K and V. Where scores and
statistics take most of the tile's room, for small d or a small M, the form is not there yet.
"""

import pytest

from vllm_teach.attention.traffic import choose_tile, tiled_traffic
from vllm_teach.performance.growth import log_log_slope

LENGTHS, DIMS = (8192, 16384, 32768, 65536), (64, 128, 256, 512)
MEMORIES = (2**17, 2**18, 2**19, 2**20, 2**21)


def moved(length: int, head_dim: int, fast_memory: int) -> int:
    """Bytes of one head in float16, with the tile that this memory takes."""
    tile_q, tile_k = choose_tile(head_dim, 2, fast_memory)
    return tiled_traffic(
        batch=1, q_len=length, kv_len=length, q_heads=1, kv_heads=1, head_dim=head_dim, input_bytes=2,
        tile_q=tile_q, tile_k=tile_k, fast_memory_bytes=fast_memory,
    ).bytes_moved  # fmt: skip


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("fast_memory", MEMORIES[:2])
def test_it_grows_with_the_square_of_the_length(head_dim, fast_memory):
    found = [moved(length, head_dim, fast_memory) for length in LENGTHS]
    assert log_log_slope(LENGTHS, found) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("length", LENGTHS[2:])
@pytest.mark.parametrize("fast_memory", MEMORIES[1:4])
def test_it_grows_with_the_square_of_the_head_size(length, fast_memory):
    found = [moved(length, head_dim, fast_memory) for head_dim in DIMS]
    assert log_log_slope(DIMS, found) == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize("length", LENGTHS[2:])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_falls_as_the_fast_memory_grows(length, head_dim):
    found = [moved(length, head_dim, fast_memory) for fast_memory in MEMORIES]
    assert log_log_slope(MEMORIES, found) == pytest.approx(-1, abs=0.1)
