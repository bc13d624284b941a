"""The flash-attn package: FlashAttention 2's CUDA kernels. Its layout and causal alignment are this project's."""

import importlib
from types import ModuleType

import torch

from vllm_teach.attention.shapes import check_qkv, check_scale
from vllm_teach.backends.blind_rows import attend_seeing_rows
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.backends.windows import no_window, refuse_window
from vllm_teach.errors import MissingDependencyError

name = "flash_attn"

_LARGEST_HEAD_DIM = 256
_OLDEST_GPU = (8, 0)  # Ampere


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
    if spec.device != "cuda":
        return f"flash-attn runs on cuda, not on {spec.device}."
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 and bfloat16, not in {spec.dtype}."
    if spec.head_dim > _LARGEST_HEAD_DIM:
        return f"flash-attn takes a head_dim up to {_LARGEST_HEAD_DIM}, not {spec.head_dim}."
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
    library = _library()

    def attend(rows: torch.Tensor) -> torch.Tensor:
        return library.flash_attn_func(rows, k, v, softmax_scale=scale, causal=causal)

    return attend_seeing_rows(attend, q, shape.kv_len, causal)


def _library() -> ModuleType:
    try:
        return importlib.import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn":
            raise MissingDependencyError(f"flash-attn is installed, but lacks {error.name}; install it.") from error
        raise MissingDependencyError(
            "The package flash-attn is not installed; on a machine with a CUDA toolchain, "
            "pip install 'vllm-teach[flash]' builds it."
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"flash-attn is installed but does not load ({error}); build it again for this PyTorch."
        ) from error
