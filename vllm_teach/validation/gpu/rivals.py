"""The attention implementations that are timed side by side: ours, PyTorch's, and other projects' where installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_teach.attention.reference import naive_attention

# Takes q, k, v `[batch, length, heads, head_dim]`, k and v with fewer heads or as many, and whether it is causal.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]

OURS = "triton"


def rivals(device: str) -> dict[str, Attention]:
    """Return the implementations by name, ours first. Whether one can run at all shows when it is called."""
    found: dict[str, Attention] = {OURS: _triton}
    backends = {"sdpa math": "MATH"}
    if device == "cuda":
        backends = {"sdpa flash": "FLASH_ATTENTION", "sdpa cudnn": "CUDNN_ATTENTION"}
        backends["sdpa efficient"] = "EFFICIENT_ATTENTION"
    found |= {name: _sdpa(backend) for name, backend in backends.items()}
    if device == "cuda" and find_spec("flash_attn"):
        found["flash_attn"] = _flash_attn
    if device == "cuda" and find_spec("xformers"):
        found["xformers"] = _xformers
    return found


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The plain formula, which writes its n² scores and probabilities to memory."""
    return naive_attention(q, k, v, causal=causal)


def _triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
    from vllm_teach.kernels.triton_kernels.problem import Options

    return flash_attention(q, k, v, Options(right=0 if causal else -1))[0]


def _sdpa(backend: str) -> Attention:
    """PyTorch's attention, held to one of its kernels: it raises RuntimeError where that one cannot run."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, length, head_dim]
            grouped = q.shape[2] != k.shape[2]
            out = scaled_dot_product_attention(q_, k_, v_, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)  # [batch, length, heads, head_dim]

    return attend


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, causal=causal)


def _xformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask() if causal else None)
