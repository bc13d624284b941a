"""What attention moves between slow and fast memory, as formulas: no tensors, and sizes that no machine here can run.

`counters` states the memory model. What each step of the naive and the tiled algorithm costs is written down once: the
implementations report it as they go, so that what is counted is what ran, and `naive_traffic` and `tiled_traffic` add
it up without running anything. The first takes microseconds at any size. The second goes over the q tiles, a few
microseconds for each and so milliseconds for 131,072 tokens in tiles of 128; the tiles of keys are multiplied out.
With a pattern it asks for the tile map first, which takes longer the first time. The backward passes: see
`backward_traffic`. Not counted: ALiBi's slopes, one number a head; masks that are computed from indices; dropout, which
draws its mask again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_teach.attention.shapes import AttentionShape, check_count
from vllm_teach.counters import Tally
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from vllm_teach.attention.patterns.base import Pattern

# A GPU's matrix units multiply 16 x 16 pieces: a narrower tile would leave them idle.
_NARROWEST_TILE = 16


def accumulator_bytes(input_bytes: int) -> int:
    """Bytes per element of scores, accumulators and statistics: float32, or float64 for float64 input."""
    return max(4, input_bytes)


def working_set_bytes(tile_q: int, tile_k: int, head_dim: int, input_bytes: int) -> int:
    """Bytes that one tile pair of one head holds in fast memory at once.

    The Q, K and V tiles in the input's dtype; the score tile, the output accumulator, m and l in float32 (float64 for
    float64 input).
    """
    tile_q, tile_k = check_count("tile_q", tile_q, 1), check_count("tile_k", tile_k, 1)
    head_dim, input_bytes = check_count("head_dim", head_dim, 1), check_count("input_bytes", input_bytes, 1)
    inputs = (tile_q + 2 * tile_k) * head_dim * input_bytes
    return inputs + (tile_q * tile_k + tile_q * (head_dim + 2)) * accumulator_bytes(input_bytes)


def choose_tile(head_dim: int, input_bytes: int, fast_memory_bytes: int) -> tuple[int, int]:
    """Return (tile_q, tile_k), powers of two, whose tile pair fits the fast memory.

    K and V are read once per q tile, so the bytes moved fall as tile_q grows: it is made as large as fits. tile_k
    hardly changes the bytes, but a larger one takes fewer steps: it is then made as large as still fits, at most
    tile_q, and at least 16 unless tile_q is smaller.

    Raises InvalidArgumentError when an argument is not positive or when not even a 1 x 1 tile fits.
    """
    fast_memory_bytes = check_count("fast_memory_bytes", fast_memory_bytes, 1)
    return largest_pair(
        lambda tile_q, tile_k: working_set_bytes(tile_q, tile_k, head_dim, input_bytes), fast_memory_bytes
    )


def largest_pair(working_set: Callable[[int, int], int], fast_memory_bytes: int) -> tuple[int, int]:
    """Return (a, b), powers of two: a as large as fits, then b as large as fits, from min(16, a) to a.

    `working_set(a, b)` is what must fit. Raises InvalidArgumentError when not even (1, 1) does.
    """
    a = 1 << (fast_memory_bytes.bit_length() - 1)
    while a >= 1:
        b = a
        while b >= min(_NARROWEST_TILE, a):
            if working_set(a, b) <= fast_memory_bytes:
                return a, b
            b //= 2
        a //= 2
    raise InvalidArgumentError(
        f"fast_memory_bytes is {fast_memory_bytes}; one query and one key need {working_set(1, 1)}."
    )


Span = tuple[int, int]  # (first, end) indices of the queries or keys of one tile


def tile_pairs(
    shape: AttentionShape, pattern: Pattern | None, tile_q: int, tile_k: int
) -> Iterator[tuple[Span, list[tuple[Span, int]]]]:
    """Yield each q tile as (first, end) with the k tiles, likewise, of which it sees a key, and the `TileKind` of each.

    EMPTY tiles are left out. A FULL tile needs no mask, a PARTIAL one does; without a pattern all are FULL.

    Raises InvalidArgumentError when a tile is not positive or the pattern is not defined for these lengths.
    """
    kinds = tile_kinds(shape, pattern, tile_q, tile_k)
    k_spans = cut(shape.kv_len, tile_k)
    for rows, row_kinds in zip(cut(shape.q_len, tile_q), kinds.tolist(), strict=True):
        yield rows, [(keys, kind) for keys, kind in zip(k_spans, row_kinds, strict=True) if kind]


def key_tile_pairs(
    shape: AttentionShape, pattern: Pattern | None, tile_q: int, tile_k: int
) -> Iterator[tuple[Span, list[tuple[Span, int]]]]:
    """Yield the same tile pairs as `tile_pairs`, but for each k tile the q tiles that see a key of it."""
    kinds = tile_kinds(shape, pattern, tile_q, tile_k)
    q_spans = cut(shape.q_len, tile_q)
    for keys, key_kinds in zip(cut(shape.kv_len, tile_k), kinds.T.tolist(), strict=True):
        yield keys, [(rows, kind) for rows, kind in zip(q_spans, key_kinds, strict=True) if kind]


def tile_kinds(shape: AttentionShape, pattern: Pattern | None, tile_q: int, tile_k: int) -> torch.Tensor:
    """Return `Pattern.tile_map`, int8 `[q tiles, k tiles]`; without a pattern every tile is FULL."""
    import torch

    from vllm_teach.attention.patterns.base import TileKind

    check_count("tile_q", tile_q, 1)
    check_count("tile_k", tile_k, 1)
    if pattern is not None:
        return pattern.tile_map(shape.q_len, shape.kv_len, tile_q, tile_k)
    tiles = -(-shape.q_len // tile_q), -(-shape.kv_len // tile_k)
    return torch.full(tiles, TileKind.FULL, dtype=torch.int8, device="cpu")


def cut(length: int, tile: int) -> list[Span]:
    """Return the (first, end) indices of the tiles of one axis; the last one may be short."""
    return [(start, min(start + tile, length)) for start in range(0, length, tile)]


def naive_steps(
    shape: AttentionShape, input_bytes: int, mask_bytes: int = 0, returns_lse: bool = False
) -> dict[str, dict[str, int]]:
    """Return what each step of the naive algorithm costs, by name, as arguments of `counters.report`.

    S and P are stored in the input's dtype, as a half-precision GPU implementation stores them. A key/value head is
    read once for every query head that shares it. `mask_bytes` are those of an explicit mask.
    """
    heads = shape.batch * shape.q_heads
    queries = heads * shape.q_len * shape.head_dim * input_bytes  # Q, and O
    keys = heads * shape.kv_len * shape.head_dim * input_bytes  # K, and V
    scores = heads * shape.q_len * shape.kv_len * input_bytes  # S, and P
    lse = heads * shape.q_len * input_bytes if returns_lse else 0
    product = 2 * heads * shape.q_len * shape.kv_len * shape.head_dim  # two FLOPs per multiply-add
    return {
        "naive.scores": {"flops": product, "bytes_read": queries + keys + mask_bytes, "bytes_written": scores},
        "naive.softmax": {"bytes_read": scores, "bytes_written": scores + lse},
        "naive.values": {"flops": product, "bytes_read": scores + keys, "bytes_written": queries},
    }


def tile_pair_step(
    shape: AttentionShape, input_bytes: int, rows: int, keys: int, tile_q: int, tile_k: int
) -> dict[str, int]:
    """Return what one tile pair of `rows` queries and `keys` keys costs, as arguments of `counters.report`.

    It reads its K and V tile once per query head, as one GPU program per query head would. What it writes and reads
    back when its working set does not fit is the score tile twice (as S and as P, like the naive algorithm), and the
    accumulator with m and l once.
    """
    heads = shape.batch * shape.q_heads
    spilled_elements = 2 * rows * keys + rows * (shape.head_dim + 2)
    return {
        "flops": heads * 2 * 2 * rows * keys * shape.head_dim,  # Q K^T and P V
        "bytes_read": heads * 2 * keys * shape.head_dim * input_bytes,  # K and V
        # A program reserves fast memory for whole tiles, also when the last one is not full.
        "working_set_bytes": working_set_bytes(
            min(tile_q, shape.q_len), min(tile_k, shape.kv_len), shape.head_dim, input_bytes
        ),
        "spill_bytes": heads * spilled_elements * accumulator_bytes(input_bytes),
    }


def q_tile_step(shape: AttentionShape, input_bytes: int, rows: int) -> dict[str, int]:
    """Return what one q tile costs besides its pairs: its queries read once, its output and its lse written once."""
    vectors = shape.batch * shape.q_heads * rows
    queries = vectors * shape.head_dim * input_bytes
    return {"bytes_read": queries, "bytes_written": queries + vectors * accumulator_bytes(input_bytes)}


def naive_traffic(
    *, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, input_bytes: int
) -> Tally:
    """Return the work of the naive algorithm: S and P each written and read once, causal or not.

    `kv_heads` changes nothing: see `naive_steps`. Raises InvalidArgumentError for a size that cannot be.
    """
    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    input_bytes = check_count("input_bytes", input_bytes, 1)
    tally = Tally()
    for name, step in naive_steps(shape, input_bytes).items():
        tally.charge(name, step)
    return tally


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
    pattern: Pattern | None = None,
    tile_q: int = 128,
    tile_k: int = 128,
    fast_memory_bytes: int = 100 * 1024,
) -> Tally:
    """Return the work of the tiled forward: Q read once, K and V once per visited tile pair, O and lse written once.

    `causal` and `pattern` hide together what either of them hides; tile pairs that they empty cost nothing.
    Raises InvalidArgumentError for a size that cannot be.
    """
    from vllm_teach.attention.variant import merge_masks

    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    input_bytes = check_count("input_bytes", input_bytes, 1)
    fast_memory_bytes = check_count("fast_memory_bytes", fast_memory_bytes, 1)
    visited = tile_kinds(shape, merge_masks(causal, pattern=pattern), tile_q, tile_k) != 0  # 0 is EMPTY
    tally = Tally(fast_memory_bytes=fast_memory_bytes)
    for (q_start, q_end), counts in zip(cut(q_len, tile_q), tile_counts(visited, kv_len, tile_k), strict=True):
        for keys, times in counts:
            step = tile_pair_step(shape, input_bytes, q_end - q_start, keys, tile_q, tile_k)
            tally.charge("tiled.pairs", step, times=times)
        tally.charge("tiled.queries", q_tile_step(shape, input_bytes, q_end - q_start))
    return tally


def tile_counts(visited: torch.Tensor, length: int, tile: int) -> list[list[tuple[int, int]]]:
    """Return, for each row of bool `[rows, tiles]`, the sizes of its visited tiles, each with how often it occurs.

    The tiles cut an axis of `length`: all are of size `tile` but the last, which may be short.
    """
    if length == 0:
        return [[] for _ in visited]
    short = length % tile or tile
    whole, last = visited[:, :-1].sum(1).tolist(), visited[:, -1].tolist()
    return [[(size, n) for size, n in ((tile, a), (short, int(b))) if n] for a, b in zip(whole, last, strict=True)]
