"""This project's Triton kernels (`kernels/triton_kernels/`): on an NVIDIA GPU, or slowly in Triton's interpreter.

Masks that are a band, causal ones and windows, run in the FlashAttention kernels, forward and backward. Any other
pattern runs in the block-sparse kernel, which goes over the pattern's tiles and has no backward pass. A paged cache is
read in place, by decode steps and prefills alike.
"""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Unpack

import torch

from vllm_teach.attention.layout import Layout, Paged, Varlen
from vllm_teach.attention.patterns.base import Pattern, TileKind
from vllm_teach.attention.patterns.tile_csr import tile_csr
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.backends.bands import Band, band_of
from vllm_teach.backends.call import check_call
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import installs

if TYPE_CHECKING:
    from vllm_teach.kernels.triton_kernels.block_sparse_forward import TileLists
    from vllm_teach.kernels.triton_kernels.problem import Options

name = "triton"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD_DIM = 256
_OLDEST_GPU = (8, 0)  # Ampere
_INTERPRETER = "TRITON_INTERPRET"


def unavailable() -> str | None:
    """Return why this machine cannot run the kernels: the package, the GPU, a compiler, or the interpreter's switch."""
    if find_spec("triton") is None:
        return f"The package triton is not installed; on Linux, {installs('gpu')} installs it."
    if _interpreted():
        return _broken_interpreter()
    if not torch.cuda.is_available():
        return (
            f"PyTorch sees no CUDA device; {_INTERPRETER}=1, set before Python starts, runs the kernels on the CPU in "
            "Triton's interpreter, a thousand times slower."
        )
    if (found := torch.cuda.get_device_capability()) < _OLDEST_GPU:
        return f"The GPU has compute capability {found[0]}.{found[1]}; the kernels need 8.0 (Ampere) or newer."
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton builds what starts its kernels with a C compiler; install gcc or clang, or name one in CC."
    return None


def supports(spec: AttentionSpec) -> str | None:
    """Return the first thing about the call that the kernels cannot do, or None."""
    if spec.device != "cuda" and not (spec.device == "cpu" and _interpreted()):
        return f"triton runs on cuda, and on cpu only with {_INTERPRETER}=1 set, not on {spec.device}."
    if spec.dtype not in _DTYPES:
        return f"triton computes in float16, bfloat16 and float32, not in {spec.dtype}."
    if spec.dtype == torch.bfloat16 and _interpreted():
        return "triton's interpreter rounds torch.bfloat16 towards zero; use float16 or float32 with it."
    if spec.head_dim > _LARGEST_HEAD_DIM:
        return f"triton takes a head_dim up to {_LARGEST_HEAD_DIM}, not {spec.head_dim}."
    if spec.layout == "paged" and (spec.dropout or spec.requires_grad):
        return "triton's kernel for paged caches has no dropout and no backward pass."
    if band_of(spec.pattern, spec.q_len, spec.kv_len) is None and (spec.dropout or spec.requires_grad):
        return f"triton's block-sparse kernel, for patterns like {spec.pattern!r}, has no dropout and no backward pass."
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`. The same input gives the same bits, gradients too."""
    shape, variant = check_call(supports, q, k, v, layout, **arguments)
    band = band_of(variant.pattern, shape.q_len, shape.kv_len)
    if band is None:
        if layout is not None:
            return attend_sequences(_attend_tiles, q, k, v, layout, **arguments)
        return _attend_tiles(q, k, v, **arguments)
    options = _options(variant, band)
    if isinstance(layout, Paged):
        from vllm_teach.kernels.triton_kernels.paged_decode import paged_attention

        tables = layout.block_table, layout.kv_lens, layout.cu_seqlens_q
        return paged_attention(q, k, v, *tables, options, q_len=shape.q_len, kv_len=shape.kv_len)[0]
    from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
    from vllm_teach.kernels.triton_kernels.problem import Lengths

    lengths = None
    if isinstance(layout, Varlen):
        lengths = Lengths(layout.cu_seqlens_q, layout.cu_seqlens_k, shape.q_len, shape.kv_len)
    return flash_attention(q, k, v, options, lengths=lengths)[0]


def _attend_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Unpack[VariantArguments]
) -> torch.Tensor:
    """Attention of a dense batch under any pattern, by its tiles."""
    from vllm_teach.kernels.triton_kernels.block_sparse_forward import block_sparse_attention, tile_candidates

    shape, variant = check_call(supports, q, k, v, None, **arguments)
    pattern = variant.pattern
    assert pattern is not None  # which is a band
    tile = tile_candidates(q)[0]
    lists = _tile_lists(pattern, shape.q_len, shape.kv_len, tile.q, tile.k, q.device)
    return block_sparse_attention(q, k, v, lists, _options(variant, (-1, -1)))[0]


# The masks of an irregular pattern may take a byte per pair of tokens, on the GPU too.
@lru_cache(maxsize=8)
def _tile_lists(pattern: Pattern, q_len: int, kv_len: int, tile_q: int, tile_k: int, device: torch.device) -> TileLists:
    from vllm_teach.kernels.triton_kernels.block_sparse_forward import TileLists

    csr = tile_csr(pattern, q_len, kv_len, tile_q, tile_k)
    return TileLists.of(csr.row_ptr, csr.k_tile, csr.kind == TileKind.FULL, csr.mask_index, csr.masks, device)


def _options(variant: Variant, band: Band) -> Options:
    from vllm_teach.kernels.triton_kernels.problem import Options

    return Options(
        scale=variant.scale,
        left=band[0],
        right=band[1],
        softcap=variant.softcap,
        slopes=variant.alibi_slopes,
        dropout_p=variant.dropout_p,
        dropout_seed=variant.dropout_seed,
    )


def _broken_interpreter() -> str | None:
    """Return why this Triton's interpreter cannot loop: up to 3.6 it converts arrays as NumPy 2.4 does not allow."""
    import numpy
    import triton

    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return "The interpreter of Triton 3.6 fails with NumPy 2.4 and newer; install triton 3.7 or numpy 2.3."
    return None


def _release(package: ModuleType) -> tuple[int, int]:
    major, minor = package.__version__.split(".")[:2]
    return int(major), int(minor)


def _interpreted() -> bool:
    """Whether Triton's interpreter is switched on; asking Triton would import it."""
    return os.environ.get(_INTERPRETER) == "1"
