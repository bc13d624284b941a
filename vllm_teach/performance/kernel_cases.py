"""The kernels of this project, each with calls to time: ours, PyTorch's for the same, and float64's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach import backends
from vllm_teach.attention.patterns import BlockSparsePattern
from vllm_teach.backends import triton_backend
from vllm_teach.kernels import cpu_attention, cpu_norms, cuda_norms, norms, quantized_matmul
from vllm_teach.performance.norm_bench import EPS, norm_cases, norm_tensors
from vllm_teach.performance.paged_read import decode_call

_HEADS, _HEAD_DIM = 8, 64
_DENSITY, _GRID = 0.25, 16  # of the block-sparse pattern: the share of its _GRID x _GRID blocks that is seen
_DECODING, _BLOCK_SIZE = 8, 16
_GROUP, _TOKENS = 64, 8


@dataclass(frozen=True)
class Case:
    """One computation. `ours`, `theirs` (PyTorch's, called `their_name`) and `exact` return tensors of one shape."""

    name: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]
    their_name: str
    exact: Callable[[], Tensor]
    grad: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel: the files in `kernels/` that it is made of, the `device` it runs on, and its cases.

    `why_not` returns why it cannot run on this machine, or None, and builds nothing. `cases` takes a sequence length, a
    dtype and a device; of these, `refuses` returns why PyTorch would be called in the kernel's place, or None.
    """

    name: str
    sources: tuple[str, ...]
    device: str
    why_not: Callable[[], str | None]
    cases: Callable[[int, torch.dtype, str], list[Case]]
    refuses: Callable[[int, torch.dtype, str], str | None] = lambda length, dtype, device: None


def _attention_cases(backend: str, length: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Attention of `[1, length, heads, head_dim]`, and a decode step over as many cached tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, length, _HEADS, _HEAD_DIM, generator=generator) for _ in range(3)]
    qkv = [tensor.to(device=device, dtype=dtype) for tensor in drawn]
    blocks = BlockSparsePattern.random(_GRID, length // _GRID, density=_DENSITY, seed=0, causal=False)
    *paged, layout = decode_call(length, _BLOCK_SIZE, _DECODING, "scattered")
    layout = type(layout)(*(getattr(layout, name).to(device) for name in ("cu_seqlens_q", "block_table", "kv_lens")))
    cache = [tensor.to(device=device, dtype=dtype) for tensor in paged]
    sparse = _attention(
        backend, f"{_DENSITY:.0%} block-sparse, n = {length:,}", "SDPA with a mask", qkv, pattern=blocks
    )
    mask = blocks.mask(length, length, torch.device(device))  # made once, as who calls SDPA in each layer would
    return [
        _attention(backend, f"causal, n = {length:,}", "SDPA", qkv, causal=True),
        replace(sparse, theirs=partial(_sdpa, qkv, mask)),
        _attention(backend, f"decode, {_DECODING} x {length:,} in blocks", "SDPA, gathered", cache, layout=layout),
    ]


def _attention(backend: str, name: str, theirs: str, qkv: list[Tensor], **arguments: Any) -> Case:
    def call(backend: str, tensors: list[Tensor]) -> Tensor:
        return backends.get(backend).run(*tensors, **arguments)

    exact = [tensor.double() for tensor in qkv]
    return Case(name, partial(call, backend, qkv), partial(call, "sdpa", qkv), theirs, partial(call, "naive", exact))


def _sdpa(qkv: list[Tensor], mask: Tensor) -> Tensor:
    """PyTorch's attention of `[1, length, heads, head_dim]`; each row of `mask` sees a key."""
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv)  # [1, heads, length, head_dim]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _backward_cases(length: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Forward and backward pass of causal attention: the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, length, _HEADS, _HEAD_DIM, generator=generator) for _ in range(3)]
    qkv = [tensor.to(device=device, dtype=dtype).requires_grad_() for tensor in drawn]
    exact = [tensor.detach().double().requires_grad_() for tensor in qkv]

    def call(backend: str, tensors: list[Tensor]) -> Tensor:
        out = backends.get(backend).run(*tensors, causal=True)
        return torch.stack(torch.autograd.grad(out, tensors, torch.ones_like(out)))

    ours, theirs = partial(call, "triton", qkv), partial(call, "sdpa", qkv)
    name = f"forward + backward, causal, n = {length:,}"
    return [Case(name, ours, theirs, "SDPA", partial(call, "naive", exact), grad=True)]


def _norm_cases(length: int, dtype: torch.dtype, device: str) -> list[Case]:
    """LayerNorm and RMSNorm of `[length, 2 * length]`, alone and with the residual addition before them."""
    tensors = norm_tensors((length, 2 * length), dtype, device)
    exact = norm_cases(*(tensor.double() for tensor in tensors))
    cases = []
    for name, ways in norm_cases(*tensors).items():
        (_, ours), (their_name, theirs), *_ = ways.items()
        true = exact[name][their_name]
        cases.append(Case(name, partial(_first, ours), partial(_first, theirs), their_name, partial(_first, true)))
    return cases


def _norms_left_to_pytorch(length: int, dtype: torch.dtype, device: str) -> str | None:
    """Return why `norms` takes PyTorch's operations for rows of `2 * length`, or None."""
    row = torch.empty(2 * length, dtype=dtype, device=device)
    paths = [norms.explain(kind, row, row, row, row) for kind in norms.KINDS]
    return next((f"PyTorch computes these norms: {path.reason}" for path in paths if path.name == "plain"), None)


def _cuda_norm_cases(length: int, dtype: torch.dtype, device: str) -> list[Case]:
    """The same, computed by the CUDA kernels."""
    x, residual, weight, bias = norm_tensors((length, 2 * length), dtype, device)
    cases = []
    for case in _norm_cases(length, dtype, device):
        kind = "rms_norm" if "RMSNorm" in case.name else "layer_norm"
        added = residual if "residual" in case.name else None
        call = partial(cuda_norms.norm, kind, x, added, weight, None if kind == "rms_norm" else bias, EPS)
        cases.append(Case(case.name, partial(_first, call), case.theirs, case.their_name, case.exact))
    return cases


def _first(call: Callable[[], Any]) -> Tensor:
    found = call()
    return found[0] if isinstance(found, tuple) else found


def _softmax_cases(length: int, dtype: torch.dtype, device: str) -> list[Case]:
    """The softmax of the rows of `[length, 2 * length]`, in one pass over them and a second one to write."""
    from vllm_teach.kernels.triton_kernels.online_softmax import online_softmax

    x = norm_tensors((length, 2 * length), dtype, device)[0]
    exact = partial(torch.softmax, x.double(), -1)
    return [Case("softmax", partial(online_softmax, x), partial(torch.softmax, x, -1), "torch.softmax", exact)]


def _product_cases(kernel: Any, length: int, dtype: torch.dtype, device: str) -> list[Case]:
    """A few tokens times weights `[4 * length, 2 * length]` of 4 and 8 bits; PyTorch's are the same in `dtype`."""
    size, out = 2 * length, 4 * length
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, size, generator=generator).to(device=device, dtype=dtype)
    cases = []
    for bits in (4, 8):
        codes = torch.randint(0, 2**bits, (out, size), generator=generator, dtype=torch.uint8).to(device)
        scales = torch.full((out, size // _GROUP), 2.0**-bits / size**0.5, device=device).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8, device=device)
        wide = (codes.double() - 2 ** (bits - 1)) * scales.double().repeat_interleave(_GROUP, dim=1)
        packed = kernel.pack(codes, scales, zeros, bits)
        name = f"{_TOKENS} tokens, {size:,} -> {out:,}, {bits} bits"
        theirs = partial(F.linear, x, wide.to(dtype))
        cases.append(
            Case(name, partial(kernel.matmul, x, packed), theirs, "F.linear", partial(F.linear, x.double(), wide))
        )
    return cases


def _triton_product_cases(length: int, dtype: torch.dtype, device: str) -> list[Case]:
    from vllm_teach.kernels.triton_kernels import dequantize_matmul

    return _product_cases(dequantize_matmul, length, dtype, device)


def _never_run() -> str:
    return "It is there to be compiled and compared with layer_norm.cu (lesson 10): nothing calls it."


def _no_cases(length: int, dtype: torch.dtype, device: str) -> list[Case]:
    return []


_TRITON = "triton_kernels/"
KERNELS = (
    Kernel("C++ attention", ("cpu/attention",), "cpu", cpu_attention.unavailable, partial(_attention_cases, "cpu")),
    Kernel("C++ norms", ("cpu/norms",), "cpu", cpu_norms.unavailable, _norm_cases, _norms_left_to_pytorch),
    Kernel(
        "C++ quantised products",
        ("cpu/matmul",),
        "cpu",
        quantized_matmul.unavailable,
        partial(_product_cases, quantized_matmul),
    ),
    Kernel(
        "Triton attention",
        tuple(
            f"{_TRITON}{name}.py" for name in ("flash_forward", "block_sparse_forward", "paged_decode", "merge_splits")
        ),
        "cuda",
        triton_backend.unavailable,
        partial(_attention_cases, "triton"),
    ),
    Kernel(
        "Triton attention, backward",
        (f"{_TRITON}flash_backward.py", f"{_TRITON}backward_math.py"),
        "cuda",
        triton_backend.unavailable,
        _backward_cases,
    ),
    Kernel(
        "Triton norms",
        (f"{_TRITON}layer_norm.py", f"{_TRITON}rms_norm.py"),
        "cuda",
        triton_backend.unavailable,
        _norm_cases,
        _norms_left_to_pytorch,
    ),
    Kernel("Triton softmax", (f"{_TRITON}online_softmax.py",), "cuda", triton_backend.unavailable, _softmax_cases),
    Kernel(
        "Triton quantised products",
        (f"{_TRITON}dequantize_matmul.py",),
        "cuda",
        triton_backend.unavailable,
        _triton_product_cases,
    ),
    Kernel("CUDA norms", ("cuda/layer_norm.cu",), "cuda", cuda_norms.unavailable, _cuda_norm_cases),
    Kernel("CUDA LayerNorm, plain", ("cuda/plain_layer_norm.cu",), "cuda", _never_run, _no_cases),
)
