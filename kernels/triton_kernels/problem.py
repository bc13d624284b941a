"""One attention call as the kernels take it: checked, flat, with a number for every option.

Dense sequences are varlen ones of equal length, so that there is one kernel: q `[batch, q_len, q_heads, head_dim]`
becomes `[batch * q_len, q_heads, head_dim]`, a view unless its batches are strided oddly, and sequence i starts at row
i * q_len where `cu_seqlens_q` would say so.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_teach.errors import InvalidArgumentError

from . import INTERPRETED
from .tile_math import dot_precision, padded, seed_halves

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256


@dataclass(frozen=True, eq=False)
class Options:
    """What changes softmax(q k^T * scale) v; names and meaning are those of `vllm_teach.attention.variant.Variant`.

    `left` and `right` are the keys that a query sees before and after its own position, -1 for all; the causal mask is
    right = 0. `slopes` are ALiBi's, float32 `[q_heads]` or `[batch, q_heads]`.
    """

    scale: float | None = None
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0


@dataclass(frozen=True, eq=False)
class Lengths:
    """Where the sequences of flat tensors start, int32 `[sequences + 1]`, and the longest of each kind."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    q_len: int
    kv_len: int


@dataclass(frozen=True, eq=False)
class Problem:
    """A call that fits together: q `[total_q, q_heads, head_dim]`, k and v `[total_k, kv_heads, head_dim]`.

    The last dimension of each is contiguous. `q_len` and `kv_len` are the longest sequences'.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: int
    q_len: int
    kv_len: int
    options: Options
    lengths: Lengths | None = None
    head_dim: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.q.shape[-1])

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lengths: Lengths | None = None
    ) -> "Problem":
        """Check the tensors of a call and flatten them; those of varlen sequences, with `lengths`, are flat already.

        Raises InvalidArgumentError, naming the argument, for what the kernels cannot do.
        """
        check_tensors(q, k, v, rank=4 if lengths is None else 3)
        if lengths is not None:
            q, k, v = (last_contiguous(x) for x in (q, k, v))
            return cls(q, k, v, len(lengths.cu_seqlens_q) - 1, lengths.q_len, lengths.kv_len, options, lengths)
        batch, q_len = q.shape[:2]
        if k.shape[0] != batch:
            raise InvalidArgumentError(f"k has shape {list(k.shape)} and q {list(q.shape)}; make their batches equal.")
        kv_len = k.shape[1]
        q, k, v = (last_contiguous(x.flatten(0, 1)) for x in (q, k, v))  # [batch, length, …] -> [batch * length, …]
        return cls(q, k, v, batch, q_len, kv_len, options)

    @property
    def q_heads(self) -> int:
        """The heads of q."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """The heads of k and v; query head h uses key head h // (q_heads // kv_heads)."""
        return self.k.shape[1]

    @property
    def banded(self) -> bool:
        """Whether a causal mask or a window hides anything."""
        return self.options.left >= 0 or self.options.right >= 0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that all kernels share, by name."""
        return self._sizes() | option_arguments(self.options, self.q, self.batch)

    def _sizes(self) -> dict[str, Any]:
        varlen = self.lengths is not None
        return {
            "q_ptr": self.q,
            "k_ptr": self.k,
            "v_ptr": self.v,
            "cu_q_ptr": self.lengths.cu_seqlens_q if self.lengths else self.q,  # not read for dense sequences
            "cu_k_ptr": self.lengths.cu_seqlens_k if self.lengths else self.q,
            "q_row": self.q.stride(0),
            "q_head": self.q.stride(1),
            "k_row": self.k.stride(0),
            "k_head": self.k.stride(1),
            "v_row": self.v.stride(0),
            "v_head": self.v.stride(1),
            "total_q": len(self.q),
            "max_q_len": self.q_len,
            "max_kv_len": self.kv_len,
            "q_heads": self.q_heads,
            "group": self.q_heads // self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "DIM": padded(self.head_dim),
            "VARLEN": varlen,
            "PRECISION": dot_precision(self.q.dtype),
        }


def option_arguments(options: Options, q: torch.Tensor, batch: int) -> dict[str, Any]:
    """Return the kernels' arguments for `options`, by name; `q` has `[…, q_heads, head_dim]`."""
    low, high = seed_halves(options.dropout_seed)
    slopes = None if options.slopes is None else options.slopes.resolve_neg()
    return {
        "slopes_ptr": q if slopes is None else slopes.expand(batch, q.shape[-2]).contiguous(),  # q: not read
        "scale": float(q.shape[-1] ** -0.5 if options.scale is None else options.scale),
        "softcap": float(options.softcap),
        "left": max(options.left, 0),
        "right": max(options.right, 0),
        "seed_low": low,
        "seed_high": high,
        "threshold": round(options.dropout_p * 2**24),  # of dropout.dropout_threshold
        "keep_scale": 1.0 / (1.0 - options.dropout_p),
        "LEFT": options.left >= 0,
        "RIGHT": options.right >= 0,
        "SOFTCAP": options.softcap > 0,
        "ALIBI": slopes is not None,
        "DROPOUT": options.dropout_p > 0,
    }


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int, k_rank: int | None = None) -> None:
    """Raise InvalidArgumentError, naming the argument, unless a kernel can take such tensors."""
    for name, tensor, wanted in (("q", q, rank), ("k", k, k_rank or rank), ("v", v, k_rank or rank)):
        if tensor.dim() != wanted:
            raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; it must have {wanted} dimensions.")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise InvalidArgumentError(
                f"{name} is {tensor.dtype} on {tensor.device} and q {q.dtype} on {q.device}; make them equal."
            )
    if q.dtype not in DTYPES:
        raise InvalidArgumentError(f"q has dtype {q.dtype}; the kernels take float16, bfloat16 and float32.")
    if k.shape != v.shape:
        raise InvalidArgumentError(f"v has shape {list(v.shape)} and k {list(k.shape)}; the two must be equal.")
    (q_heads, head_dim), (kv_heads, kv_dim) = q.shape[-2:], k.shape[-2:]
    if kv_dim != head_dim or not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise InvalidArgumentError(
            f"q has head_dim {head_dim} and k {kv_dim}; they must be equal and from 1 to {LARGEST_HEAD_DIM}."
        )
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise InvalidArgumentError(f"q has {q_heads} heads and k {kv_heads}; make the first a multiple of the second.")
    check_device(q)


def check_device(tensor: torch.Tensor, name: str = "q") -> None:
    """Raise InvalidArgumentError, naming the argument `name`, unless kernels can run where it is, in its dtype."""
    if tensor.device.type != "cuda" and not (INTERPRETED and tensor.device.type == "cpu"):
        raise InvalidArgumentError(
            f"{name} is on {tensor.device}; move it to a CUDA device, or set TRITON_INTERPRET=1 before importing this "
            "module and move it to the CPU."
        )
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        raise InvalidArgumentError(
            f"{name} has dtype torch.bfloat16, which Triton's interpreter rounds towards zero; use float16 or float32 "
            "there."
        )


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return `x` such that kernels can read it: the last dimension contiguous, and no negation put off."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()
