"""Attention over an INT8 cache as it lies (see `kvcache.quantized_storage`): who reads it, and what stands for it.

Such a cache is k and v of dtype int8, `[num_blocks, block_size, kv_heads, bytes]`, with a `Paged` layout. The checks of
a call and the choice of a backend go by the numbers that the bytes stand for. For a backend that reads numbers alone
they have to be copied out first (`DequantizedBlocks`).
"""

from __future__ import annotations

import warnings

import torch

from vllm_teach.attention.layout import Layout, Paged
from vllm_teach.attention.shapes import check_tensor
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kvcache.quantized_storage import packed_bytes

# The backends that take such k and v.
READERS = ("cpu",)


def reads_packed(backend: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `backend`, or with "auto" one of them, reads packed caches here, for queries of `dtype` on `device`.

    Builds the kernel where that has not been done; if it cannot be built, a warning says so and the answer is no.
    """
    from vllm_teach.kernels import cpu_attention as kernel

    if backend not in ("auto", *READERS) or device.type != "cpu" or dtype not in kernel.DTYPES:
        return False
    if kernel.unavailable() is not None:
        return False
    try:
        kernel.load()
    except MissingDependencyError as error:
        warnings.warn(f"The INT8 cache will be read through copies. {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


def is_packed(k: torch.Tensor, layout: Layout | None) -> bool:
    """Whether `k` is part of a packed cache."""
    return isinstance(layout, Paged) and isinstance(k, torch.Tensor) and k.dtype == torch.int8


def stand_ins(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of the shapes and the dtype of the numbers in packed `k` and `v`, which have none in them.

    Raises InvalidArgumentError when k or v is not what packing numbers of q's dtype and head_dim gives, is on another
    device than q, or is cut from a larger tensor so that the scales in it cannot be viewed.
    """
    head_dim = q.shape[-1]
    wanted = packed_bytes(head_dim, q.dtype)
    for name, packed in (("k", k), ("v", v)):
        check_tensor(name, packed)
        if packed.dtype != torch.int8 or packed.shape[-1] != wanted:
            raise InvalidArgumentError(
                f"{name} has dtype {packed.dtype} and shape {list(packed.shape)}; packed for a q of {q.dtype} and "
                f"head_dim {head_dim} it is int8 with {wanted} bytes in its last place."
            )
        if packed.device != q.device:
            raise InvalidArgumentError(f"{name} is on {packed.device} and q on {q.device}; move one to the other.")
        places = (*packed.stride()[:-1], packed.storage_offset())
        if packed.stride(-1) != 1 or any(place % q.dtype.itemsize for place in places):
            raise InvalidArgumentError(
                f"{name} has strides {packed.stride()} and starts at byte {packed.storage_offset()}; the bytes of a "
                f"head must lie side by side, and heads at multiples of {q.dtype.itemsize}: copy it."
            )
    numbers = q.new_empty(head_dim)
    return numbers.expand(*k.shape[:-1], head_dim), numbers.expand(*v.shape[:-1], head_dim)
