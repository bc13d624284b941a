"""Attention over a paged KV cache, split along the keys: vLLM's PagedAttention with Flash-Decoding's parallelism.

The keys of a sequence lie in blocks anywhere in the cache; a block table says where (Kwon et al., arXiv 2309.06180,
section 4.1). A decode step has one query per sequence and head, too few for a GPU, so each sequence's keys are cut into
splits that run side by side, and a second kernel merges their results by the log-sum-exp (Dao et al., "Flash-Decoding",
2023). All query heads that share a key head, and all queries of the sequence up to a tile's rows, work on the same tile
of keys: it is read once. One query is only the smallest case: the same kernel serves a prefill over a cache.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from vllm_teach.errors import InvalidArgumentError

from . import INTERPRETED, tuning
from .merge_splits import merge_splits
from .problem import Options, check_tensors, last_contiguous, option_arguments
from .tile_math import (
    LN2,
    dot_precision,
    in_band,
    modify_scores,
    online_update,
    padded,
)

LARGEST_SPLITS = 64


def paged_attention_spec(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, kv_len: int, scale: float
) -> torch.Tensor:
    """Return attention of one sequence and head, q `[q_len, head_dim]`, caches `[num_blocks, block_size, head_dim]`.

    `table` is int32 `[blocks of the sequence]`. For several heads and sequences, and with masks, it is
    `vllm_teach.attention.naive_attention` of the gathered keys.
    """
    k = k_cache[table.long()].flatten(0, 1)[:kv_len].float()  # [kv_len, head_dim]
    v = v_cache[table.long()].flatten(0, 1)[:kv_len].float()  # [kv_len, head_dim]
    return (torch.softmax(q.float() @ k.T * scale, dim=1) @ v).to(q.dtype)


@triton.jit(do_not_specialize=["q_heads", "group", "total_q", "max_q_len", "left", "right", "splits"])
def paged_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    table_row: tl.tensor,
    total_q: tl.tensor,
    max_q_len: tl.tensor,
    q_heads: tl.tensor,
    group: tl.tensor,
    splits: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
) -> None:
    """Write one split's out `[splits, total_q, q_heads, HEAD_DIM]` and lse float32 `[splits, total_q, q_heads]`.

    Row r of a tile is query r // group of the sequence and the head r % group of those that share a key head.
    """
    tiles = tl.cdiv(max_q_len * group, TILE_Q)
    kv_heads = q_heads // group
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    kv_head = tl.program_id(0) // splits // tiles % kv_heads
    sequence = tl.program_id(0) // splits // tiles // kv_heads
    q_first = tl.load(cu_q_ptr + sequence)
    q_len = tl.load(cu_q_ptr + sequence + 1) - q_first
    kv_len = tl.load(kv_lens_ptr + sequence)
    if tile * TILE_Q >= q_len * group:
        return

    row = tile * TILE_Q + tl.arange(0, TILE_Q)
    dims = tl.arange(0, DIM)
    queries, heads = row // group, kv_head * group + row % group
    there = queries < q_len
    rows = (q_first + queries).to(tl.int64)  # of q and out
    q = tl.load(
        q_ptr + (rows * q_row + heads * q_head)[:, None] + dims[None, :],
        mask=there[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )  # [TILE_Q, DIM]
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + sequence * q_heads + heads, mask=there, other=0.0)[:, None]

    offset = kv_len - q_len
    begin, end = split_keys(
        tile * TILE_Q // group, (tile * TILE_Q + TILE_Q - 1) // group, offset, q_len, kv_len, left, right, split,
        splits, TILE_K, LEFT, RIGHT,
    )  # fmt: skip
    acc = tl.zeros([TILE_Q, DIM], dtype=tl.float32)
    m = tl.full([TILE_Q], float("-inf"), dtype=tl.float32)
    l = tl.zeros([TILE_Q], dtype=tl.float32)  # noqa: E741
    for start in range(begin, end, TILE_K):
        keys = start + tl.arange(0, TILE_K)
        exists = keys < end  # what lies behind the last key is never read
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_row + keys // BLOCK_SIZE, mask=exists, other=0)
        block, slot = block.to(tl.int64), keys % BLOCK_SIZE
        read = exists[:, None] & (dims < HEAD_DIM)[None, :]
        k_base = k_ptr + kv_head.to(tl.int64) * k_head
        k = tl.load(k_base + (block * k_block + slot * k_slot)[:, None] + dims[None, :], mask=read, other=0.0)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [TILE_Q, TILE_K]
        scores = modify_scores(product, scale, softcap, slope, queries[:, None], keys[None, :], offset, SOFTCAP, ALIBI)
        visible = in_band(queries[:, None], keys[None, :], offset, end, left, right, LEFT, RIGHT)
        scores = tl.where(visible, scores, float("-inf"))
        m, l, weights, decay = online_update(m, l, scores)  # noqa: E741
        v_base = v_ptr + kv_head.to(tl.int64) * v_head
        v = tl.load(v_base + (block * v_block + slot * v_slot)[:, None] + dims[None, :], mask=read, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    target = (split.to(tl.int64) * total_q + rows) * q_heads + heads  # [TILE_Q]
    out = (acc / tl.where(l == 0.0, 1.0, l)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + target[:, None] * HEAD_DIM + dims[None, :], out, mask=there[:, None] & (dims < HEAD_DIM)[None, :]
    )
    tl.store(lse_ptr + target, (m + tl.log2(l)) * LN2, mask=there)


@triton.jit
def split_keys(
    first_query: tl.tensor,
    last_query: tl.tensor,
    offset: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    TILE_K: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
) -> tuple:
    """Return the keys [begin, end) of one split: an equal share, in whole tiles, of those that the queries see."""
    begin = 0
    end = kv_len
    if RIGHT:
        end = tl.maximum(tl.minimum(kv_len, tl.minimum(last_query, q_len - 1) + offset + right + 1), 0)
    if LEFT:
        begin = tl.minimum(tl.maximum(first_query + offset - left, 0), end)
    share = tl.cdiv(tl.cdiv(end - begin, TILE_K), splits) * TILE_K
    first = begin + split * share
    return first, tl.minimum(first + share, end)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    options: Options | None = None,
    *,
    q_len: int = 1,
    kv_len: int | None = None,
    splits: int | None = None,
    tile: tuning.Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of attention over a paged cache: out like q, lse float32 `[q_heads, total_q]`.

    q is `[total_q, q_heads, head_dim]`, the queries of all sequences; `cu_seqlens_q`, int32 `[sequences + 1]`, says
    where each starts, None that each has one, and `q_len` is the longest. The caches are
    `[num_blocks, block_size, kv_heads, head_dim]`, `block_table` int32 `[sequences, blocks]`, `kv_lens` int32
    `[sequences]`; `kv_len`, the longest or None for the table's room, decides the number of `splits` where that is
    None. What lies behind a sequence's last key is not read. There is no gradient and no dropout.

    Raises InvalidArgumentError for tensors that the kernel cannot take, dropout among the options, and splits that are
    not from 1 to 64. The values in the tables are not read here and must fit the cache.
    """
    options = options or Options()
    check_tensors(q, k_cache, v_cache, rank=3, k_rank=4)
    if options.dropout_p > 0:
        raise InvalidArgumentError(f"options have dropout_p={options.dropout_p}; attention over a cache has none.")
    sequences, (total_q, q_heads, head_dim) = len(kv_lens), q.shape
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(sequences + 1, dtype=torch.int32, device=q.device)
    block_size, kv_heads = k_cache.shape[1:3]
    group = q_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(total_q, q_heads, dtype=torch.float32, device=q.device)
    if total_q == 0:
        return out, lse.T
    tile = tile or _tile(q, q_len * group)
    programs = triton.cdiv(q_len * group, tile.q) * sequences * kv_heads
    if splits is None:
        splits = choose_splits(programs, triton.cdiv(kv_len or block_table.shape[1] * block_size, tile.k), q.device)
    if not 1 <= splits <= LARGEST_SPLITS:
        raise InvalidArgumentError(f"splits is {splits}; give a whole number from 1 to {LARGEST_SPLITS}.")
    parts, part_lse = out, lse  # one split needs no merge and writes the result itself
    if splits > 1:
        parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, total_q, q_heads, dtype=torch.float32, device=q.device)
    q, k_cache, v_cache = (last_contiguous(x) for x in (q, k_cache, v_cache))
    block_table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    sizes = {"HEAD_DIM": head_dim, "DIM": padded(head_dim)}
    arguments = option_arguments(options, q, sequences)
    arguments = {name: value for name, value in arguments.items() if name in paged_attention_kernel.arg_names}
    with torch.cuda.device_of(q):
        paged_attention_kernel[(programs * splits,)](
            q_ptr=q, k_ptr=k_cache, v_ptr=v_cache, out_ptr=parts, lse_ptr=part_lse, cu_q_ptr=cu_seqlens_q,
            table_ptr=block_table, kv_lens_ptr=kv_lens, q_row=q.stride(0), q_head=q.stride(1),
            k_block=k_cache.stride(0), k_slot=k_cache.stride(1), k_head=k_cache.stride(2),
            v_block=v_cache.stride(0), v_slot=v_cache.stride(1), v_head=v_cache.stride(2),
            table_row=block_table.stride(0), BLOCK_SIZE=block_size, total_q=total_q, max_q_len=q_len, q_heads=q_heads,
            group=group, splits=splits, PRECISION=dot_precision(q.dtype), **sizes, **arguments, **tile.launch(),
        )  # fmt: skip
    if splits > 1:
        merge_splits(parts, part_lse, out, lse)
    return out, lse.T


def choose_splits(programs: int, key_tiles: int, device: torch.device) -> int:
    """Return into how many splits to cut the keys so that every multiprocessor has two programs, if there are tiles."""
    multiprocessors = 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(triton.cdiv(2 * multiprocessors, programs), key_tiles, LARGEST_SPLITS))


def _tile(q: torch.Tensor, rows: int) -> tuning.Tile:
    """The default tile, with more rows for a prefill than the 16 that are enough for a decode step."""
    tile = tuning.candidates("paged", q.shape[-1], q.dtype)[0]
    most = 64 if q.element_size() == 2 else 16
    return replace(tile, q=max(16, min(triton.next_power_of_2(rows), most)))
