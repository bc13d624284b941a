"""xFormers' memory_efficient_attention: CUDA kernels that take large head sizes, and float32 too."""

import importlib
from types import ModuleType

import torch

from vllm_teach.attention.shapes import AttentionShape, check_qkv, check_scale
from vllm_teach.backends.blind_rows import attend_seeing_rows
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.windows import no_window, refuse_window
from vllm_teach.errors import MissingDependencyError

name = "xformers"

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
    if spec.device != "cuda":
        return f"xFormers' attention runs on cuda, not on {spec.device}."
    if spec.dtype not in _HEAD_DIM_MULTIPLE:
        return f"xFormers' attention computes in float16, bfloat16 and float32, not in {spec.dtype}."
    if spec.head_dim % (multiple := _HEAD_DIM_MULTIPLE[spec.dtype]):
        return f"In {spec.dtype} xFormers' attention takes multiples of {multiple} as head_dim, not {spec.head_dim}."
    return no_window(name, spec.window, spec.kv_len)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention output; see `spec.Backend.run`."""
    shape = check_qkv(q, k, v)
    scale = check_scale(scale, shape.head_dim)
    refuse_window(name, window, causal, shape.kv_len)
    ops = _library()
    # xFormers' LowerTriangularMask is aligned top-left; the project's convention has a mask of its own.
    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if causal else None

    def attend(rows: torch.Tensor) -> torch.Tensor:
        grouped = (_split_groups(rows, shape), _share_heads(k, shape), _share_heads(v, shape))
        out = ops.memory_efficient_attention(*grouped, attn_bias=bias, scale=scale)
        return out.reshape(rows.shape)  # [batch, rows, q_heads, head_dim]

    return attend_seeing_rows(attend, q, shape.kv_len, causal)


def _split_groups(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """`[batch, rows, q_heads, head_dim]` -> xFormers' BMGHK `[batch, rows, kv_heads, group, head_dim]`, a view."""
    return rows.unflatten(2, (shape.kv_heads, shape.group)) if shape.group > 1 else rows


def _share_heads(k: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """`[batch, kv_len, kv_heads, head_dim]` -> `[batch, kv_len, kv_heads, group, head_dim]` without copying a key."""
    return k.unsqueeze(3).expand(-1, -1, -1, shape.group, -1) if shape.group > 1 else k


def _library() -> ModuleType:
    try:
        importlib.import_module("xformers")
        return importlib.import_module("xformers.ops")
    except ModuleNotFoundError as error:
        if error.name != "xformers":
            raise MissingDependencyError(f"xFormers is installed, but lacks {error.name}; install it.") from error
        raise MissingDependencyError(
            "The package xformers is not installed; on a Linux machine with a CUDA GPU, "
            "pip install 'vllm-teach[gpu]' installs it."
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"xFormers is installed but does not load ({error}); install the version built for this PyTorch."
        ) from error
