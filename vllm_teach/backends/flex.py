"""PyTorch's FlexAttention: a kernel compiled for the call, with masks, softcap and ALiBi built in, that skips tiles.

The first call of a size compiles for seconds; inductor keeps what it compiled on disk (TORCHINDUCTOR_CACHE_DIR).
Without a compiler PyTorch would run the same call unfused, with the whole score matrix: this backend then refuses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Unpack

import torch

from vllm_teach.attention.layout import Layout
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.backends.bands import nothing_seen
from vllm_teach.backends.call import check_call
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError

name = "flex"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Dynamo's default is 8 sizes; beyond its limit it would silently run the unfused version, if `fullgraph` let it.
_MOST_KERNELS = 256

# What the compiler said when it failed in this process: it is not asked again.
_broken: list[str] = []


def unavailable() -> str | None:
    """Return why this machine cannot compile FlexAttention: no C++ compiler, or a failed one, or a CPU without AVX2."""
    if _broken:
        return _broken[0]
    if shutil.which(compiler := os.environ.get("CXX") or "g++") is None:
        return f"torch.compile finds no C++ compiler ({compiler} is not on the PATH), and unfused it holds all scores."
    if not torch.cuda.is_available() and not _has_avx2():
        return "FlexAttention is compiled for CPUs with AVX2, and this one has none or ATEN_CPU_CAPABILITY hides it."
    return None


def supports(spec: AttentionSpec) -> str | None:
    """Return the first thing about the call that FlexAttention cannot do, or None."""
    if spec.dtype not in _DTYPES:
        return f"flex computes in float16, bfloat16 and float32, not in {spec.dtype}."
    if spec.device not in ("cpu", "cuda"):
        return f"flex runs on cpu and cuda, not on {spec.device}."
    if spec.requires_grad and spec.device == "cpu":
        return "FlexAttention has no backward pass on CPUs."
    if spec.dropout:
        return "FlexAttention has no dropout."
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`. The first call of a size compiles, for seconds."""
    call = check_call(supports, q, k, v, layout, **arguments)
    if layout is not None:
        return attend_sequences(_attend, q, k, v, layout, **arguments)
    return _attend_checked(q, k, v, *call)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Unpack[VariantArguments]) -> torch.Tensor:
    return _attend_checked(q, k, v, *check_call(supports, q, k, v, None, **arguments))


def _attend_checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape, variant: Variant
) -> torch.Tensor:
    from vllm_teach.backends.flex_mask import block_mask

    if q.numel() == 0 or shape.kv_len == 0:
        return nothing_seen(q, k, v)
    with _compiler_errors(), torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
        out = _compiled()(
            *(_padded(tensor) for tensor in (q, k, v)),
            score_mod=_score_rule(shape, variant, q.device),
            block_mask=block_mask(variant.pattern, shape.q_len, shape.kv_len, q.device),
            scale=variant.scale,
            enable_gqa=shape.group > 1,
        )  # [batch, q_heads, room(q_len), head_dim]
    return out[:, :, : shape.q_len].transpose(1, 2)


@contextmanager
def _compiler_errors() -> Iterator[None]:
    """Turn a failure of the compiler into MissingDependencyError, and remember it: the backend is unavailable then."""
    try:
        yield
    except RuntimeError as error:
        from torch._dynamo.exc import BackendCompilerFailed

        if not isinstance(error, BackendCompilerFailed):
            raise
        first_line = str(error).partition("\n")[0]
        _broken[:] = [f"torch.compile could not compile FlexAttention here ({first_line.rstrip('.: ')})."]
        raise MissingDependencyError(_broken[0]) from error


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Inductor asks ATEN_CPU_CAPABILITY for the width of its vectors, and leaves it out of its cache's key: it would run
    # loops for AVX-512 in a build for AVX2. Named here, the width is a part of the key.
    width = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability())
    options: dict[str, Any] = {} if width is None else {"cpp.simdlen": width}
    return torch.compile(flex_attention, fullgraph=True, dynamic=False, options=options)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """`[batch, length, heads, head_dim]` -> `[batch, heads, room(length), head_dim]`, 0 behind the end."""
    from vllm_teach.backends.flex_mask import room

    length = tensor.shape[1]
    return torch.nn.functional.pad(tensor.transpose(1, 2), (0, 0, 0, room(length) - length)).contiguous()


def _score_rule(shape: AttentionShape, variant: Variant, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return FlexAttention's `score_mod` for softcap and ALiBi; None for neither.

    Its numbers are tensors: a Python number would be compiled into the kernel, and another one compile another kernel.
    """
    if not variant.softcap and variant.alibi_slopes is None:
        return None
    cap = torch.tensor(variant.softcap, device=device) if variant.softcap else None
    slopes = variant.alibi_slopes  # [q_heads] or [batch, q_heads]
    if slopes is not None:
        slopes = slopes.expand(shape.batch, shape.q_heads).contiguous()
    offset = torch.tensor(shape.causal_offset, device=device)

    def rule(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[batch, head] * (query + offset - key).abs()
        return score

    return rule


def _has_avx2() -> bool:
    return torch.cpu._is_avx2_supported() and os.environ.get("ATEN_CPU_CAPABILITY") != "default"
