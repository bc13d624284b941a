"""FlashAttention's function for decoding: append to the cache, turn by position, attend; all in one call.

Interface and semantics are those of FlashAttention 2.8 (`flash_attn/flash_attn_interface.py`), on any device and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_teach.attention.flash_cache import CacheBlocks
from vllm_teach.attention.flash_interface import flash_arguments
from vllm_teach.attention.rotary import apply_rotary
from vllm_teach.attention.shapes import (
    AttentionShape,
    check_count,
    check_ints,
    check_real_device,
    check_tensor,
    compute_dtype,
)
from vllm_teach.attention.split_kv import choose_num_splits_for, split_kv_attention
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.attention.variant import Variant
from vllm_teach.errors import InvalidArgumentError


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Write k and v into the cache behind each sequence, then let q attend to what the cache holds of it.

    - `q`: `[batch, q_len, q_heads, head_dim]`.
    - `k_cache`, `v_cache`: `[batch_cache, capacity, kv_heads, head_dim]`, or with `block_table` `[num_blocks,
      block_size, kv_heads, head_dim]`. **Changed in place** where k and v are given.
    - `k`, `v`: `[batch, new_len, kv_heads, head_dim]`, written to the slots from `cache_seqlens` on. new_len need not
      be q_len.
    - `cache_seqlens`: how many slots of each sequence are filled before the call, int32 `[batch]`, or one int for all.
      Required with k; without it, the whole cache is.
    - `cache_batch_idx`: int32 `[batch]`, which row of a dense cache each sequence is; a row may come twice.
    - `cache_leftpad`: int32 `[batch]`, the slots before it are invisible. Masks and ALiBi count positions from it on;
      rotary angles count slots, from 0.
    - `block_table`: int32 `[batch, most blocks of one]`; a block may hold any number of keys.
    - `rotary_cos`, `rotary_sin`: `[positions, rotary_dim // 2]`, only with k. New key j is turned to position
      cache_seqlens + j. Query i is turned to cache_seqlens + i if `causal` or a window is given; else all queries are
      turned to cache_seqlens. `rotary_interleaved`: see `rotary.apply_rotary`.
    - `softmax_scale`, `causal`, `window_size`, `softcap`, `alibi_slopes`: see `Variant`; with all keys of a sequence,
      new ones too, as its kv_len. Masks are aligned bottom-right.
    - `num_splits`: into how many parts the keys are cut, see `split_kv`; 0 lets `choose_num_splits` decide.

    Returns out (q's shape and dtype); with `return_softmax_lse` also the log-sum-exp `[batch, q_heads, q_len]`, float32
    (float64 for float64 input), -inf for a row that sees no key, whose out is 0.

    All is checked before anything is written; q, k and v may be views of the cache, and are what it held before. Slots
    behind a sequence's end or before its left padding may hold anything, NaN too. Sequences that share slots (a
    repeated row or block) are written in the order of the batch, so the last one stays, and read after that.

    Differences from FlashAttention 2: its log-sum-exp of an empty row is +inf; blocks must hold a multiple of 256 keys
    and exclude `cache_leftpad`; dtypes are float16 and bfloat16; rotary_dim is a multiple of 16, and the tables have
    q's dtype and as many rows as the cache has slots, not only as many as are used; queries are turned as without a
    window when the window is as long as the cache; of a repeated row any writer may stay; a length beyond the cache is
    not noticed.

    Raises InvalidArgumentError, naming the argument, when the arguments do not fit together, the cache or block table
    has no room for cache_seqlens + new_len keys, or a gradient is asked for: there is no backward here.
    """
    _check_tensors(q, k_cache, v_cache, k, v)
    _check_no_gradient(rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes)
    batch, q_len, q_heads, head_dim = q.shape
    blocks = CacheBlocks.of(k_cache, v_cache, batch, cache_batch_idx, block_table)
    new_len = 0 if k is None else k.shape[1]
    filled = _filled(cache_seqlens, blocks, batch, k)
    ends = [length + new_len for length in filled]
    starts = _starts(cache_leftpad, filled)
    _check_room(blocks, starts, filled, ends)

    longest = max((end - start for start, end in zip(starts, ends, strict=True)), default=0)
    shape = AttentionShape(batch, q_len, longest, q_heads, k_cache.shape[2], head_dim)
    arguments = flash_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes)
    variant = Variant.of(shape, q.device, **arguments)
    if check_count("num_splits", num_splits, 0) == 0:
        num_splits = choose_num_splits_for(shape, q.device)

    if alibi_slopes is not None:
        arguments["alibi_slopes"] = alibi_slopes = alibi_slopes.detach()

    with torch.no_grad():
        ordered = variant.pattern is not None  # causal or local: the queries stand one behind the other
        q, k = _turn(q, k, rotary_cos, rotary_sin, filled, ordered, rotary_interleaved)
        if k is not None and v is not None:
            q, k, v = (_apart(x, k_cache, v_cache) for x in (q, k, v))
            for index in range(batch):  # the first write; from here on nothing raises
                blocks.append(index, filled[index], k[index], v[index])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse_dtype = compute_dtype(q)
        lse = torch.empty(batch, q_heads, q_len, dtype=lse_dtype, device=q.device)
        for index in range(batch):
            keys, values = blocks.read(index, starts[index], ends[index])
            if alibi_slopes is not None and alibi_slopes.dim() == 2:
                arguments["alibi_slopes"] = alibi_slopes[index]
            one = slice(index, index + 1)
            if num_splits == 1:
                found = flash_attention(q[one], keys[None], values[None], return_lse=True, **arguments)
            else:
                found = split_kv_attention(q[one], keys[None], values[None], num_splits, **arguments)
            out[one], lse[one] = found
    return (out, lse) if return_softmax_lse else out


def _turn(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    filled: list[int],
    ordered: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return q and k turned to their positions; unchanged without tables."""
    if cos is None and sin is None:
        return q, k
    if cos is None or sin is None:
        raise InvalidArgumentError("only one of rotary_cos and rotary_sin is given; give both or neither.")
    if k is None:
        raise InvalidArgumentError("rotary_cos is given without k; it turns new keys, those in the cache are turned.")
    first = torch.tensor(filled, dtype=torch.long, device=q.device)[:, None]  # [batch, 1]
    q_pos = first + torch.arange(q.shape[1], device=q.device) * ordered  # [batch, q_len]
    k_pos = first + torch.arange(k.shape[1], device=q.device)  # [batch, new_len]
    return (
        apply_rotary(q, cos, sin, q_pos, interleaved=interleaved),
        apply_rotary(k, cos, sin, k_pos, interleaved=interleaved),
    )


def _filled(
    cache_seqlens: int | torch.Tensor | None, blocks: CacheBlocks, batch: int, k: torch.Tensor | None
) -> list[int]:
    """Return how many slots of each sequence are filled before the call."""
    if cache_seqlens is None:
        if k is not None:
            raise InvalidArgumentError("k is given without cache_seqlens; say behind how many keys the new ones go.")
        return [blocks.room(index) for index in range(batch)]
    if not isinstance(cache_seqlens, torch.Tensor):
        return [check_count("cache_seqlens", cache_seqlens, 0)] * batch
    check_ints("cache_seqlens", cache_seqlens, (batch,))
    filled = cache_seqlens.tolist()
    if min(filled, default=0) < 0:
        raise InvalidArgumentError(f"cache_seqlens holds {min(filled)}; give how many keys are in the cache, from 0.")
    return filled


def _starts(cache_leftpad: torch.Tensor | None, filled: list[int]) -> list[int]:
    """Return the first visible slot of each sequence."""
    if cache_leftpad is None:
        return [0] * len(filled)
    check_ints("cache_leftpad", cache_leftpad, (len(filled),))
    starts = cache_leftpad.tolist()
    for start, length in zip(starts, filled, strict=True):
        if not 0 <= start <= length:
            raise InvalidArgumentError(
                f"cache_leftpad holds {start} for a sequence whose cache_seqlens is {length}; give 0 to {length}."
            )
    return starts


def _check_room(blocks: CacheBlocks, starts: list[int], filled: list[int], ends: list[int]) -> None:
    """Raise InvalidArgumentError unless each sequence's slots, filled and new ones, are in the cache."""
    for index, (start, length, end) in enumerate(zip(starts, filled, ends, strict=True)):
        if end > blocks.room(index):
            new = f" and k brings {end - length} more" if end > length else ""
            raise InvalidArgumentError(
                f"cache_seqlens is {length} for sequence {index}{new}; its part of the cache has room for "
                f"{blocks.room(index)} keys ({len(blocks.tables[index])} block(s) of {blocks.block_size})."
            )
        blocks.check(index, start, end)


def _check_tensors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
) -> None:
    """Raise InvalidArgumentError unless the five fit together and none of them wants a gradient."""
    if (k is None) != (v is None):
        raise InvalidArgumentError(f"{'k' if k is None else 'v'} is None and the other is not; give both or neither.")
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if k is not None and v is not None:
        tensors |= {"k": k, "v": v}
    for name, tensor in tensors.items():
        _check_one(name, tensor, q)
    batch, _, q_heads, head_dim = q.shape
    blocks, block_size, kv_heads, _ = k_cache.shape
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads or head_dim == 0:
        raise InvalidArgumentError(
            f"q has shape {list(q.shape)} and k_cache {list(k_cache.shape)}; the {q_heads} heads of q must be a "
            f"multiple of the {kv_heads} of k_cache, and no size of a head 0."
        )
    new_len = 0 if k is None else k.shape[1]
    wanted = {"k_cache": [blocks, block_size, kv_heads, head_dim], "k": [batch, new_len, kv_heads, head_dim]}
    wanted |= {"v_cache": wanted["k_cache"], "v": wanted["k"]}
    for name, tensor in tensors.items():
        if name != "q" and list(tensor.shape) != wanted[name]:
            raise InvalidArgumentError(
                f"{name} has shape {list(tensor.shape)}; it must be {wanted[name]} to fit q, {list(q.shape)}, "
                f"and k_cache, {list(k_cache.shape)}."
            )
        if name in ("k_cache", "v_cache") and k is not None:
            _check_writable(name, tensor)


def _check_one(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Check what does not depend on the sizes: type, rank, dtype, device, no gradient."""
    check_tensor(name, tensor)
    if tensor.dim() != 4:
        raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; give [batch, length, heads, head_dim].")
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise InvalidArgumentError(f"{name} has dtype {tensor.dtype}; use float16, bfloat16, float32 or float64.")
    if tensor.dtype != q.dtype:
        raise InvalidArgumentError(f"{name} has dtype {tensor.dtype} and q {q.dtype}; convert one to the other.")
    if tensor.device != q.device:
        raise InvalidArgumentError(f"{name} is on {tensor.device} and q on {q.device}; move one to the other.")
    check_real_device(name, tensor)
    _check_no_gradient(**{name: tensor})


def _check_no_gradient(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidArgumentError(
                f"{name} requires a gradient, and decoding from a cache has none; "
                "call this under torch.no_grad(), or use flash_attn_func."
            )


def _check_writable(name: str, cache: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
        raise InvalidArgumentError(f"{name} is expanded, so its entries share memory; give one to write to.")
    if cache.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            f"{name} was made under torch.inference_mode, outside of which it cannot be changed; "
            "call this under it, or clone the cache outside."
        )


def _apart(tensor: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy when it may lie in a cache: it is read while that is written."""
    own = tensor.untyped_storage().data_ptr()
    return tensor.clone() if own in {x.untyped_storage().data_ptr() for x in (k_cache, v_cache)} else tensor
