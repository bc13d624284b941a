"""The flash-attn package: FlashAttention 2's CUDA kernels. Its layout and causal alignment are this project's."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Unpack

import torch

from vllm_teach.attention.layout import Layout, Varlen
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.backends.bands import attend_seeing_rows, band_of, blind_rows, nothing_seen
from vllm_teach.backends.call import check_call
from vllm_teach.backends.library import import_library
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError, installs

name = "flash_attn"

_DEVICE = "cuda"
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256
_OLDEST_GPU = (8, 0)  # Ampere
_BLOCK_MULTIPLE = 256  # csrc/flash_attn/flash_api.cpp: "Paged KV cache block size must be divisible by 256"


def unavailable() -> str | None:
    """Return why this machine cannot run flash-attn: the package, the GPU, or the GPU's generation."""
    try:
        _library()
    except MissingDependencyError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device, and flash-attn has no CPU kernels."
    if (found := torch.cuda.get_device_capability()) < _OLDEST_GPU:
        return f"The GPU has compute capability {found[0]}.{found[1]}; flash-attn needs 8.0 (Ampere) or newer."
    return None


def supports(spec: AttentionSpec) -> str | None:
    """Return the first thing about the call that the kernels cannot do, or None."""
    if spec.device != _DEVICE:
        return f"flash-attn runs on {_DEVICE}, not on {spec.device}."
    if spec.dtype not in _DTYPES:
        return f"flash-attn computes in float16 and bfloat16, not in {spec.dtype}."
    if spec.head_dim > _LARGEST_HEAD_DIM:
        return f"flash-attn takes a head_dim up to {_LARGEST_HEAD_DIM}, not {spec.head_dim}."
    if band_of(spec.pattern, spec.q_len, spec.kv_len) is None:
        return f"flash-attn knows causal masks and windows, and {type(spec.pattern).__name__} is neither."
    if spec.dropout:
        return "flash-attn draws its dropout mask on the GPU, and dropout_seed asks for the one it names."
    if spec.block_size is not None and spec.block_size % _BLOCK_MULTIPLE:
        return f"flash-attn reads paged caches whose block_size is a multiple of 256, not {spec.block_size}."
    if spec.layout == "paged" and spec.requires_grad:
        return "flash-attn has no backward pass through a paged cache."
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`."""
    shape, variant = check_call(supports, q, k, v, layout, **arguments)
    library = _library()
    options = _options(shape, variant)
    if layout is None:
        blind = blind_rows(options["window_size"], shape.q_len, shape.kv_len)
        return attend_seeing_rows(lambda rows: library.flash_attn_func(rows, k, v, **options), q, k, v, blind)
    if q.numel() == 0 or shape.kv_len == 0:
        return nothing_seen(q, k, v)
    if isinstance(layout, Varlen):
        starts = {"cu_seqlens_k": layout.cu_seqlens_k}
    else:
        ends = torch.cumsum(layout.kv_lens, 0, dtype=torch.int32)  # of the keys, if they lay behind one another
        starts = {"cu_seqlens_k": torch.nn.functional.pad(ends, (1, 0)), "block_table": layout.block_table}
    return library.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=layout.cu_seqlens_q, max_seqlen_q=shape.q_len, max_seqlen_k=shape.kv_len,
        **starts, **options,
    )  # fmt: skip


def _options(shape: AttentionShape, variant: Variant) -> dict[str, Any]:
    """Return FlashAttention's keyword arguments for a variant that it supports; its causal mask is a window too."""
    return {
        "softmax_scale": variant.scale,
        "window_size": band_of(variant.pattern, shape.q_len, shape.kv_len),
        "softcap": variant.softcap,
        "alibi_slopes": variant.alibi_slopes,
    }


def _library() -> ModuleType:
    return import_library(
        "flash_attn",
        package="flash-attn",
        install=f"on a machine with a CUDA toolchain, {installs('flash')} builds it",
        repair="build it again for this PyTorch",
    )
