"""xFormers' memory_efficient_attention: CUDA kernels that take large head sizes, and float32 too."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Unpack

import torch

from vllm_teach.attention.layout import Layout, Sequences, check_layout
from vllm_teach.attention.patterns.band import EVERYTHING
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.bands import CAUSAL, Band, attend_seeing_rows, band_of, blind_rows, nothing_seen
from vllm_teach.backends.call import check_call
from vllm_teach.backends.library import import_library
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError, installs

name = "xformers"

_DEVICE = "cuda"
# Its kernels load 16 bytes of a head at once: xformers/ops/fmha/cutlass.py, _minimum_gemm_alignment (flash.py: 8 too).
_HEAD_DIM_MULTIPLE = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}


def unavailable() -> str | None:
    """Return why this machine cannot run xFormers: the package or the GPU."""
    try:
        _library()
    except MissingDependencyError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device, and xFormers' attention has had no CPU kernels since 0.0.22."
    return None


def supports(spec: AttentionSpec) -> str | None:
    """Return the first thing about the call that the kernels cannot do, or None."""
    if spec.device != _DEVICE:
        return f"xFormers' attention runs on {_DEVICE}, not on {spec.device}."
    if spec.dtype not in _HEAD_DIM_MULTIPLE:
        return f"xFormers' attention computes in float16, bfloat16 and float32, not in {spec.dtype}."
    if spec.head_dim % (multiple := _HEAD_DIM_MULTIPLE[spec.dtype]):
        return f"In {spec.dtype} xFormers' attention takes multiples of {multiple} as head_dim, not {spec.head_dim}."
    return _no_such_mask(spec) or _no_such_feature(spec)


def _no_such_mask(spec: AttentionSpec) -> str | None:
    band = _band(spec.pattern, spec)
    if band is None:
        return f"xFormers' attention knows causal masks and windows, and {type(spec.pattern).__name__} is neither."
    if band != EVERYTHING and band[1] != 0 and (spec.layout != "dense" or -1 in band or spec.dtype == torch.float32):
        return f"xFormers' attention has no mask for a window of {band[0]} keys to the left and {band[1]} to the right."
    return None


def _no_such_feature(spec: AttentionSpec) -> str | None:
    if spec.softcap:
        return f"xFormers' attention has no softcap, and the call's is {spec.softcap:g}."
    if spec.alibi:
        return "xFormers' attention takes ALiBi only as a bias tensor of n² elements."
    if spec.dropout:
        return "xFormers' attention draws its dropout mask on the GPU, and dropout_seed asks for the one it names."
    if spec.layout == "paged":
        return "xFormers' kernels for paged caches are not used by this package."
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
    ops = _library()
    band = _band(variant.pattern, shape) or EVERYTHING

    def attend(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: object) -> torch.Tensor:
        grouped = (_split_groups(rows, shape), _share_heads(keys, shape), _share_heads(values, shape))
        out = ops.memory_efficient_attention(*grouped, attn_bias=bias, scale=variant.scale)
        return out.reshape(rows.shape)  # [batch, rows, q_heads, head_dim]

    if layout is None:
        blind = blind_rows(band, shape.q_len, shape.kv_len)
        return attend_seeing_rows(lambda rows: attend(rows, k, v, _dense_bias(ops, band)), q, k, v, blind)
    sequences = check_layout(q, k, v, layout)
    seeing, q_lens = _seeing_rows(sequences, band)
    if not seeing:
        return nothing_seen(q, k, v)
    out = torch.zeros_like(q)
    bias = _varlen_bias(ops, band, q_lens, list(sequences.kv_lens))
    out[seeing] = attend(q[None, seeing], k[None], v[None], bias)[0]
    return out


def _seeing_rows(sequences: Sequences, band: Band) -> tuple[list[int], list[int]]:
    """Return the rows of q that see a key, and how many those are of each sequence.

    xFormers' bottom-right masks want at least as many keys as queries: then every row sees one.
    """
    rows: list[int] = []
    q_lens: list[int] = []
    for index, start in enumerate(sequences.q_starts[:-1]):
        one = sequences.shape_of(index)
        blind = blind_rows(band, one.q_len, one.kv_len)
        rows += range(start + blind, start + one.q_len)
        q_lens.append(one.q_len - blind)
    return rows, q_lens


def _band(pattern: Pattern | None, shape: AttentionShape) -> Band | None:
    """Return `band_of`, where one query, which has no key after it, counts as causal: its windows have masks."""
    band = band_of(pattern, shape.q_len, shape.kv_len)
    return (band[0], 0) if band is not None and band[0] != -1 and shape.q_len == 1 else band


def _dense_bias(ops: Any, band: Band) -> object | None:
    """Return xFormers' mask for a band, aligned bottom-right; its LowerTriangularMask is aligned top-left."""
    left, right = band
    biases = ops.fmha.attn_bias
    if band == EVERYTHING:
        return None
    if right != 0:
        return biases.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)
    if band == CAUSAL:
        return biases.LowerTriangularFromBottomRightMask()
    # It counts the query's own key, FlashAttention's window does not.
    return biases.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)


def _varlen_bias(ops: Any, band: Band, q_lens: list[int], kv_lens: list[int]) -> object:
    """Return xFormers' mask for sequences behind one another, each with such a band."""
    biases = ops.fmha.attn_bias
    if band == CAUSAL:
        return biases.BlockDiagonalCausalFromBottomRightMask.from_seqlens(q_lens, kv_lens)
    apart = biases.BlockDiagonalMask.from_seqlens(q_lens, kv_lens)
    return apart if band == EVERYTHING else apart.make_local_attention_from_bottomright(band[0] + 1)


def _split_groups(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """`[batch, rows, q_heads, head_dim]` -> xFormers' BMGHK `[batch, rows, kv_heads, group, head_dim]`, a view."""
    return rows.unflatten(2, (shape.kv_heads, shape.group)) if shape.group > 1 else rows


def _share_heads(k: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """`[batch, kv_len, kv_heads, head_dim]` -> `[batch, kv_len, kv_heads, group, head_dim]` without copying a key."""
    return k.unsqueeze(3).expand(-1, -1, -1, shape.group, -1) if shape.group > 1 else k


def _library() -> ModuleType:
    return import_library(
        "xformers.ops",
        package="xformers",
        install=f"on a Linux machine with a CUDA GPU, {installs('gpu')} installs it",
        repair="install the version built for this PyTorch",
    )
