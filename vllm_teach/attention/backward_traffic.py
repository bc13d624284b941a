"""What the backward passes of attention move between slow and fast memory, and what is kept for them: formulas.

The memory model is `counters`', and the forward passes are in `traffic`. The naive backward pass is that of the
FlashAttention paper (arXiv 2205.14135, appendix B.4, algorithm 3), which is also what autograd does with
`naive_attention`: P was kept, so there are four products, and dP and dS are matrices of n² elements like P. The tiled
one is FlashAttention-2's (arXiv 2307.08691, algorithm 2): it keeps lse instead of P, pays a fifth product to compute
P's tiles again, and lets none of the three matrices leave fast memory. `tiled_backward` reports it as it goes; what
autograd does cannot be seen from here, so of the naive one there is the formula only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_teach.attention.shapes import AttentionShape, check_count
from vllm_teach.attention.traffic import accumulator_bytes, cut, largest_pair, tile_counts, tile_kinds
from vllm_teach.counters import Tally

if TYPE_CHECKING:
    from vllm_teach.attention.patterns.base import Pattern


def backward_working_set_bytes(tile_q: int, tile_k: int, head_dim: int, input_bytes: int) -> int:
    """Bytes that one tile pair of one head holds in fast memory at once in the backward pass.

    The Q, dO, K and V tiles in the input's dtype; in float32 (float64 for float64 input) the tiles of P and of dP,
    which becomes dS, the accumulators of dK and dV, this pair's part of dQ, lse and D.
    """
    tile_q, tile_k = check_count("tile_q", tile_q, 1), check_count("tile_k", tile_k, 1)
    head_dim, input_bytes = check_count("head_dim", head_dim, 1), check_count("input_bytes", input_bytes, 1)
    inputs = 2 * (tile_q + tile_k) * head_dim * input_bytes
    wide = 2 * tile_q * tile_k + (2 * tile_k + tile_q) * head_dim + 2 * tile_q
    return inputs + wide * accumulator_bytes(input_bytes)


def choose_backward_tile(head_dim: int, input_bytes: int, fast_memory_bytes: int) -> tuple[int, int]:
    """Return (tile_q, tile_k), powers of two, whose tile pair fits the fast memory in the backward pass.

    Q, dO and dQ move once per k tile, so here tile_k is made as large as fits, and then tile_q, at most tile_k and at
    least 16 unless tile_k is smaller: `traffic.choose_tile` with the two sides swapped.

    Raises InvalidArgumentError when an argument is not positive or when not even a 1 x 1 tile fits.
    """
    fast_memory_bytes = check_count("fast_memory_bytes", fast_memory_bytes, 1)
    tile_k, tile_q = largest_pair(
        lambda tile_k, tile_q: backward_working_set_bytes(tile_q, tile_k, head_dim, input_bytes), fast_memory_bytes
    )
    return tile_q, tile_k


def backward_pair_step(
    shape: AttentionShape, input_bytes: int, rows: int, keys: int, tile_q: int, tile_k: int
) -> dict[str, int]:
    """Return what one tile pair of `rows` queries and `keys` keys costs, as arguments of `counters.report`.

    For each query head it reads its Q and dO tile, lse and D, and adds to its rows of dQ, which lie in slow memory as
    every tile of keys adds to them. What it writes and reads back when its working set does not fit are the tiles of
    S, P, dP and dS and the accumulators of dK and dV.
    """
    heads, wide = shape.batch * shape.q_heads, accumulator_bytes(input_bytes)
    dq = rows * shape.head_dim * wide
    return {
        "flops": heads * 5 * 2 * rows * keys * shape.head_dim,  # Q K^T, dO V^T, P^T dO, dS K and dS^T Q
        "bytes_read": heads * (2 * rows * shape.head_dim * input_bytes + 2 * rows * wide + dq),
        "bytes_written": heads * dq,
        "working_set_bytes": backward_working_set_bytes(
            min(tile_q, shape.q_len), min(tile_k, shape.kv_len), shape.head_dim, input_bytes
        ),
        "spill_bytes": heads * (4 * rows * keys + 2 * keys * shape.head_dim) * wide,
    }


def backward_keys_step(shape: AttentionShape, input_bytes: int, keys: int) -> dict[str, int]:
    """Return what one k tile costs besides its pairs: K and V read once, dK and dV written once.

    Once per key/value head: dK and dV are sums over the query heads that share it, and one program that goes over all
    of them keeps the sums in its accumulators.
    """
    both = 2 * shape.batch * shape.kv_heads * keys * shape.head_dim * input_bytes
    return {"bytes_read": both, "bytes_written": both}


def backward_queries_step(shape: AttentionShape, input_bytes: int, has_dlse: bool = False) -> dict[str, int]:
    """Return what all queries cost besides the pairs.

    Before: D, the sum of dO * O over a row (less the gradient of lse, where there is one), and dQ, set to 0. After, for
    16-bit input: dQ, summed up in float32, is rounded to the input's dtype.
    """
    vectors, wide = shape.batch * shape.q_heads * shape.q_len, accumulator_bytes(input_bytes)
    elements = vectors * shape.head_dim
    rounds = input_bytes < wide
    return {
        "bytes_read": 2 * elements * input_bytes + has_dlse * vectors * wide + rounds * elements * wide,
        "bytes_written": vectors * wide + elements * wide + rounds * elements * input_bytes,
    }


def naive_backward_steps(shape: AttentionShape, input_bytes: int) -> dict[str, dict[str, int]]:
    """Return what each step of the naive backward pass costs, by name, as arguments of `counters.report`.

    P, dP and dS are stored in the input's dtype. dK and dV come out of their products once for every query head; where
    heads share a key/value head, a last step sums them.
    """
    heads = shape.batch * shape.q_heads
    queries = heads * shape.q_len * shape.head_dim * input_bytes  # Q, dO and dQ
    keys = heads * shape.kv_len * shape.head_dim * input_bytes  # K, V, dK and dV
    scores = heads * shape.q_len * shape.kv_len * input_bytes  # P, dP and dS
    products = 2 * 2 * heads * shape.q_len * shape.kv_len * shape.head_dim  # two in each step
    steps = {
        # dV = P^T dO and dP = dO V^T
        "naive.backward.values": {
            "flops": products,
            "bytes_read": (scores + queries) + (queries + keys),
            "bytes_written": keys + scores,
        },
        # dS = P * (dP - the sum of P * dP over the row)
        "naive.backward.softmax": {"bytes_read": 2 * scores, "bytes_written": scores},
        # dQ = dS K * scale and dK = dS^T Q * scale
        "naive.backward.scores": {
            "flops": products,
            "bytes_read": (scores + keys) + (scores + queries),
            "bytes_written": queries + keys,
        },
    }
    if shape.group > 1:
        steps["naive.backward.groups"] = {"bytes_read": 2 * keys, "bytes_written": 2 * keys // shape.group}
    return steps


def naive_backward_traffic(
    *, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, input_bytes: int
) -> Tally:
    """Return the work of the naive backward pass, causal or not. Raises InvalidArgumentError for impossible sizes."""
    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    input_bytes = check_count("input_bytes", input_bytes, 1)
    tally = Tally()
    for name, step in naive_backward_steps(shape, input_bytes).items():
        tally.charge(name, step)
    return tally


def tiled_backward_traffic(
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
    """Return the work of the tiled backward pass, of `flash_attention` without a gradient of lse.

    `causal` and `pattern` hide together what either of them hides; tile pairs that they empty cost nothing.
    Raises InvalidArgumentError for a size that cannot be.
    """
    from vllm_teach.attention.variant import merge_masks

    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    input_bytes = check_count("input_bytes", input_bytes, 1)
    fast_memory_bytes = check_count("fast_memory_bytes", fast_memory_bytes, 1)
    visited = tile_kinds(shape, merge_masks(causal, pattern=pattern), tile_q, tile_k).T != 0  # [k tiles, q tiles]
    tally = Tally(fast_memory_bytes=fast_memory_bytes)
    tally.charge("tiled.backward.queries", backward_queries_step(shape, input_bytes))
    for (k_start, k_end), counts in zip(cut(kv_len, tile_k), tile_counts(visited, q_len, tile_q), strict=True):
        for rows, times in counts:
            step = backward_pair_step(shape, input_bytes, rows, k_end - k_start, tile_q, tile_k)
            tally.charge("tiled.backward.pairs", step, times=times)
        tally.charge("tiled.backward.keys", backward_keys_step(shape, input_bytes, k_end - k_start))
    return tally


def naive_saved_bytes(
    *, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, input_bytes: int
) -> int:
    """Return the bytes that the naive forward keeps for its backward pass: Q, K, V and P."""
    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    input_bytes = check_count("input_bytes", input_bytes, 1)
    return _inputs_bytes(shape, input_bytes) + shape.batch * shape.q_heads * shape.q_len * shape.kv_len * input_bytes


def tiled_saved_bytes(
    *, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, input_bytes: int
) -> int:
    """Return the bytes that the tiled forward keeps for its backward pass: Q, K, V, out and lse."""
    shape = AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)
    input_bytes = check_count("input_bytes", input_bytes, 1)
    vectors = shape.batch * shape.q_heads * shape.q_len
    out_and_lse = vectors * (shape.head_dim * input_bytes + accumulator_bytes(input_bytes))
    return _inputs_bytes(shape, input_bytes) + out_and_lse


def _inputs_bytes(shape: AttentionShape, input_bytes: int) -> int:
    queries = shape.q_len * shape.q_heads
    keys = shape.kv_len * shape.kv_heads
    return shape.batch * (queries + 2 * keys) * shape.head_dim * input_bytes
