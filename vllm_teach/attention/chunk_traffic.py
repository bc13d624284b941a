"""What chunked attention moves between slow and fast memory; `counters` states the memory model.

A meeting of two chunks depends on no other, so each reads its queries itself and writes its summary. The scores of a
chunk seldom fit fast memory: chunks are sized to bound memory, not to stay on a chip. This is what FlashAttention's
tiles improved on.
"""

from vllm_teach.attention.chunk_summaries import Chunk, ChunkedCall
from vllm_teach.attention.traffic import accumulator_bytes, working_set_bytes


def summary_step(call: ChunkedCall, chunk: Chunk, value_dim: int, input_bytes: int) -> dict[str, int]:
    """Return what one summary costs: two products; Q, K and V chunks read, m, l and acc written."""
    rows, keys, heads = _sizes(call, chunk)
    dims = call.shape.head_dim + value_dim
    accumulator = accumulator_bytes(input_bytes)
    return {
        "flops": heads * 2 * rows * keys * dims,  # Q K^T and P V
        "bytes_read": heads * (rows * call.shape.head_dim + keys * dims) * input_bytes,
        "bytes_written": heads * rows * (value_dim + 2) * accumulator,
        "working_set_bytes": working_set_bytes(rows, keys, max(call.shape.head_dim, value_dim), input_bytes),
        "spill_bytes": heads * 2 * rows * keys * accumulator,  # S and P
    }


def merge_step(call: ChunkedCall, rows: int, summaries: int, value_dim: int, input_bytes: int) -> dict[str, int]:
    """Return what merging the summaries of one chunk of queries costs: all read, out and lse written."""
    vectors = call.shape.batch * call.shape.q_heads * rows
    accumulator = accumulator_bytes(input_bytes)
    return {
        "bytes_read": vectors * summaries * (value_dim + 2) * accumulator,
        "bytes_written": vectors * (value_dim * call.output_dtype.itemsize + accumulator),
    }


def backward_step(call: ChunkedCall, chunk: Chunk, value_dim: int, input_bytes: int) -> dict[str, int]:
    """Return what the backward pass of one chunk costs: both products again, and two for the gradient of each."""
    rows, keys, heads = _sizes(call, chunk)
    dims = call.shape.head_dim + value_dim
    accumulator = accumulator_bytes(input_bytes)
    gradients = (rows * call.shape.head_dim + keys * dims) * accumulator  # each is read, added to and written
    return {
        "flops": heads * 3 * 2 * rows * keys * dims,
        "bytes_read": heads * ((rows + keys) * dims * input_bytes + 2 * rows * accumulator + gradients),
        "bytes_written": heads * gradients,
        "working_set_bytes": working_set_bytes(rows, keys, max(call.shape.head_dim, value_dim), input_bytes),
        "spill_bytes": heads * 3 * rows * keys * accumulator,  # S, P and the gradient of P
    }


def _sizes(call: ChunkedCall, chunk: Chunk) -> tuple[int, int, int]:
    """Return rows and keys of the chunk, and the number of heads of all sequences."""
    (first_row, end_row), (first_key, end_key) = chunk.rows, chunk.keys
    return end_row - first_row, end_key - first_key, call.shape.batch * call.shape.q_heads
