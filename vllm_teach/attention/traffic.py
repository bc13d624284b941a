"""What attention moves between slow and fast memory, as formulas: no tensors, any size, in microseconds.

`counters` states the memory model. The naive and the tiled implementation report these amounts as they go, so that
what is counted is what ran; the two functions here answer "what would it cost" without running it.
"""

from collections.abc import Iterator

from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.counters import Work
from vllm_teach.errors import InvalidArgumentError

# A GPU's matrix units multiply 16 x 16 pieces: a narrower tile of keys would leave them idle.
_NARROWEST_TILE_K = 16


def accumulator_bytes(input_bytes: int) -> int:
    """Bytes per element of scores, accumulators and statistics: float32, or float64 for float64 input."""
    return max(4, input_bytes)


def working_set_bytes(tile_q: int, tile_k: int, head_dim: int, input_bytes: int) -> int:
    """Bytes that one tile pair of one head holds in fast memory at once.

    The Q, K and V tiles in the input's dtype; the score tile, the output accumulator, m and l in float32 (float64 for
    float64 input).
    """
    inputs = (tile_q + 2 * tile_k) * head_dim * input_bytes
    return inputs + (tile_q * tile_k + tile_q * (head_dim + 2)) * accumulator_bytes(input_bytes)


def spill_bytes(rows: int, keys: int, head_dim: int, input_bytes: int) -> int:
    """Bytes that one tile pair writes and reads back when its working set does not fit.

    The score tile twice (as S and as P, like the naive algorithm), and the accumulator with m and l once.
    """
    return (2 * rows * keys + rows * (head_dim + 2)) * accumulator_bytes(input_bytes)


def choose_tile(head_dim: int, input_bytes: int, fast_memory_bytes: int) -> tuple[int, int]:
    """Return (tile_q, tile_k), powers of two, whose tile pair fits the fast memory.

    K and V are read once per q tile, so the bytes moved fall as tile_q grows: it is made as large as fits. tile_k
    hardly changes the bytes, but a larger one takes fewer steps: it is then made as large as still fits, at most
    tile_q, and at least 16 unless tile_q is smaller.

    Raises InvalidArgumentError when an argument is not positive or when not even a 1 x 1 tile fits.
    """
    arguments = {"head_dim": head_dim, "input_bytes": input_bytes, "fast_memory_bytes": fast_memory_bytes}
    for name, value in arguments.items():
        if value <= 0:
            raise InvalidArgumentError(f"{name} is {value}; it must be positive.")
    tile_q = 1 << (fast_memory_bytes.bit_length() - 1)
    while tile_q >= 1:
        tile_k = tile_q
        while tile_k >= min(_NARROWEST_TILE_K, tile_q):
            if working_set_bytes(tile_q, tile_k, head_dim, input_bytes) <= fast_memory_bytes:
                return tile_q, tile_k
            tile_k //= 2
        tile_q //= 2
    smallest = working_set_bytes(1, 1, head_dim, input_bytes)
    raise InvalidArgumentError(
        f"fast_memory_bytes is {fast_memory_bytes}; one query and one key of head_dim {head_dim} need {smallest}."
    )


def tile_pairs(
    shape: AttentionShape, causal: bool, tile_q: int, tile_k: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Yield each q tile as (start, end) with the k tiles, likewise, of which it sees at least one key.

    Under a causal mask the tiles beyond the diagonal are left out: the last query of the tile, number end - 1, sees
    the keys below end + causal_offset.
    """
    for q_start in range(0, shape.q_len, tile_q):
        q_end = min(q_start + tile_q, shape.q_len)
        keys_seen = min(shape.kv_len, q_end + shape.causal_offset) if causal else shape.kv_len
        k_tiles = [(k_start, min(k_start + tile_k, shape.kv_len)) for k_start in range(0, keys_seen, tile_k)]
        yield (q_start, q_end), k_tiles


def naive_traffic(
    *, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, input_bytes: int
) -> Work:
    """Return the work of the naive algorithm: S and P each written and read once, causal or not.

    S and P are stored in the input's dtype, as a half-precision GPU implementation stores them. A key/value head is
    read once for every query head that shares it (`kv_heads` changes nothing).
    """
    heads = batch * q_heads
    scores = heads * q_len * kv_len * input_bytes
    queries = heads * q_len * head_dim * input_bytes
    keys = heads * kv_len * head_dim * input_bytes
    return Work(
        flops=2 * 2 * heads * q_len * kv_len * head_dim,  # Q K^T and P V, two per multiply-add
        bytes_read=(queries + keys) + scores + (scores + keys),  # Q and K; S; P and V
        bytes_written=scores + scores + queries,  # S; P; O
    )


def tiled_traffic(
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    input_bytes: int,
    causal: bool = False,
    tile_q: int = 128,
    tile_k: int = 128,
    fast_memory_bytes: int = 100 * 1024,
) -> Work:
    """Return the work of the tiled forward: Q read once, K and V once per visited tile pair, O and lse written once."""
    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    heads = batch * q_heads
    fits = working_set_bytes(min(tile_q, q_len), min(tile_k, kv_len), head_dim, input_bytes) <= fast_memory_bytes
    work = Work()
    for (q_start, q_end), k_tiles in tile_pairs(shape, causal, tile_q, tile_k):
        rows = q_end - q_start
        tile_out = rows * (head_dim * input_bytes + accumulator_bytes(input_bytes))  # O and lse
        work.add(0, heads * rows * head_dim * input_bytes, heads * tile_out)
        for k_start, k_end in k_tiles:
            keys = k_end - k_start
            spilled = 0 if fits else spill_bytes(rows, keys, head_dim, input_bytes)
            read = 2 * keys * head_dim * input_bytes  # K and V
            work.add(heads * 2 * 2 * rows * keys * head_dim, heads * (read + spilled), heads * spilled)
    return work
