"""Split-KV attention ("flash decoding"): the keys of one query are shared out, and the partial results merged.

FlashAttention gives each worker of a GPU its own queries. A decode step has one query per sequence: with a small batch
most workers idle, while a few read the whole cache. So the keys are cut into splits, each split is attended to on its
own, and gives (out, log-sum-exp) as if there were no other keys; a second, small step merges them exactly.

Source: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", PyTorch blog, October 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch

from vllm_teach.attention.autocast import without_autocast
from vllm_teach.attention.merge_attentions import check_parts, merge_parts
from vllm_teach.attention.online_softmax import SoftmaxState, finish, update
from vllm_teach.attention.score_tiles import ScoreTiles, stack_groups, unstack_groups
from vllm_teach.attention.shapes import AttentionShape, check_count, check_qkv, compute_dtype
from vllm_teach.attention.traffic import Span, tile_pairs
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.errors import InvalidArgumentError

_Tile = tuple[Span, int]  # the (first, end) of its keys, and what the pattern leaves of it, a TileKind
_MOST_SPLITS = 128  # FlashAttention's limit: what a further split saves is less than what its merge costs


@without_autocast
def split_kv_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_splits: int = 0,
    *,
    tile_k: int = 128,
    **arguments: Unpack[VariantArguments],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of softmax(q k^T * scale) v, computed for `num_splits` parts of the keys and then merged.

    Shapes: q `[batch, q_len, q_heads, head_dim]`, k and v `[batch, kv_len, kv_heads, head_dim]`, out like q, lse
    `[batch, q_heads, q_len]`. What is shared out are tiles of `tile_k` keys, those that the mask leaves; more splits
    than tiles are as many as tiles. 0 lets `choose_num_splits` decide. The result is the same for any number up to
    rounding: masks, softcap and ALiBi count positions in the whole sequence. `arguments`: see `Variant`.

    Partial results, lse and all arithmetic are float32 (float64 for float64 input); out has q's dtype. All queries
    form one tile, so memory is that of `num_splits` outputs and q_len * tile_k scores: made for few queries. The splits
    run one after another here: what a GPU gains by running them side by side, this function only shows.

    Raises InvalidArgumentError when the arguments do not fit together, and for dropout, which decoding never uses.
    """
    shape = check_qkv(q, k, v)
    variant = Variant.of(shape, q.device, **arguments)
    if variant.dropout_p:
        raise InvalidArgumentError(f"dropout_p is {variant.dropout_p}; split-KV attention decodes, so it must be 0.")
    if (num_splits := check_count("num_splits", num_splits, 0)) == 0:
        num_splits = choose_num_splits_for(shape, q.device, tile_k)

    # All queries are the rows of one tile; of no query there is none.
    pairs = list(tile_pairs(shape, variant.pattern, max(1, shape.q_len), tile_k))
    splits = share_out(pairs[0][1] if pairs else [], num_splits)
    partial = [_attend(q, k, v, tiles, shape, variant) for tiles in splits]
    out, lse = merge_attention([out for out, _ in partial], [lse for _, lse in partial])
    return out.to(q.dtype), lse


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (out, lse) of attention over all keys, given those over disjoint parts of the keys.

    Each of `outs` is `[batch, q_len, q_heads, head_dim]`, each of `lses` `[batch, q_heads, q_len]`. A part's weight is
    its share of the softmax's denominator: exp(its lse - lse of all). A part in which a row saw no key has lse -inf
    and weight 0; a row that saw no key in any gives 0 and -inf. Computed in the dtype of `lses`; out has `outs`' dtype.
    Under xFormers' name, and with its arguments, this is `merge_attentions.merge_attentions`.

    Raises InvalidArgumentError when there is no part, or the parts' shapes do not fit each other.
    """
    parts, part_lses = check_parts("outs", outs, "lses", lses)
    out, lse = merge_parts(parts, part_lses)
    return out.to(parts[0].dtype), lse


def share_out(tiles: Sequence[_Tile], num_splits: int) -> list[Sequence[_Tile]]:
    """Return `tiles` cut into at most `num_splits` parts of as many tiles, the last of which may be shorter.

    A number that does not divide the tiles may give fewer parts: 8 tiles in 5 splits are 2 + 2 + 2 + 2. Without any
    tile there is one part, with nothing in it.
    """
    per_split = max(1, -(-len(tiles) // num_splits))
    return [tiles[first : first + per_split] for first in range(0, len(tiles), per_split)] or [tiles]


def choose_num_splits(
    batch: int, heads: int, q_len: int, kv_len: int, num_workers: int, *, tile_q: int = 64, tile_k: int = 128
) -> int:
    """Return into how many parts to cut the keys so that `num_workers` workers have something to do.

    Without splitting there are batch * heads * ceil(q_len / tile_q) pieces of work. When they fill 80 % of the workers,
    there is nothing to win. Otherwise s splits make s times as many pieces, done in waves of `num_workers`; the last
    wave may be nearly empty, and the share of busy workers is waves / ceil(waves). Each split also costs: its result
    is written, read again and merged. So the rule takes the fewest splits that reach 85 % of the best share, among
    those that really make as many parts as asked for (8 tiles in 5 splits are 4 parts). With 48 pieces on 108
    workers, 2 splits keep 96 of 108 busy, 3 splits only 144 of 216.

    The rule is FlashAttention 2's (its `flash_api.cpp`). Heads that share keys are one piece there at q_len = 1.
    Raises InvalidArgumentError for sizes that no call has.
    """
    for name, value in (("batch", batch), ("q_len", q_len), ("kv_len", kv_len)):
        check_count(name, value, 0)
    for name, value in (("heads", heads), ("num_workers", num_workers), ("tile_q", tile_q), ("tile_k", tile_k)):
        check_count(name, value, 1)
    pieces, tiles = batch * heads * -(-q_len // tile_q), -(-kv_len // tile_k)
    if pieces == 0 or pieces >= 0.8 * num_workers:
        return 1
    busy: dict[int, float] = {}
    for splits in range(1, min(_MOST_SPLITS, num_workers, tiles) + 1):
        if -(-tiles // -(-tiles // splits)) == splits:
            waves = pieces * splits / num_workers
            busy[splits] = waves / math.ceil(waves)
    return next((splits for splits, share in busy.items() if share >= 0.85 * max(busy.values())), 1)


def choose_num_splits_for(shape: AttentionShape, device: torch.device, tile_k: int = 128) -> int:
    """Return `choose_num_splits` for a call of these sizes on `device`.

    Workers are PyTorch's threads on a CPU; on a GPU two thread blocks per multiprocessor, as FlashAttention counts. A
    group of query heads that shares its keys is one piece of work with group * q_len rows.
    """
    if device.type == "cuda":
        workers = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        workers = torch.get_num_threads()
    rows = shape.group * shape.q_len
    return choose_num_splits(shape.batch, shape.kv_heads, rows, shape.kv_len, workers, tile_k=tile_k)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[_Tile],
    shape: AttentionShape,
    variant: Variant,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of all queries over the keys of `tiles` alone, both in the dtype that is computed in."""
    dtype = compute_dtype(q)
    modifier = ScoreTiles.of(shape, variant, q.device, first_batch=0)
    rows = (0, shape.q_len)
    q_ = stack_groups(q, shape).to(dtype) * variant.scale  # [batch, kv_heads, group * q_len, head_dim]
    state = SoftmaxState.empty(q_.shape[:-1], shape.head_dim, dtype=dtype, device=q.device)
    for keys, kind in tiles:
        k_tile, v_tile = (t[:, slice(*keys)].transpose(1, 2).to(dtype) for t in (k, v))  # [batch, kv_heads, keys, d]
        scores = q_ @ k_tile.transpose(-2, -1)  # [batch, kv_heads, group * q_len, keys]
        state = update(state, modifier.modify(scores, rows, keys, kind), v_tile)
    out, lse = finish(state)
    return unstack_groups(out, shape), lse.reshape(shape.batch, shape.q_heads, shape.q_len)
