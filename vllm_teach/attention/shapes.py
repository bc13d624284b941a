"""The sizes of one attention call, and the checks of what callers give: numbers, tensors, and that q, k, v agree."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING

from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# Half of what an int64 holds: PyTorch counts with these, and the sum of two of them must still fit.
LARGEST_COUNT = 2**62
# What is multiplied with float32 scores must be a number in float32, too, also after a kernel has multiplied it by
# log2(e) = 1.44: beyond it is inf, and inf * 0 is NaN.
_LARGEST_REAL = 2e38


@dataclass(frozen=True)
class AttentionShape:
    """q is `[batch, q_len, q_heads, head_dim]`; k and v are `[batch, kv_len, kv_heads, head_dim]`.

    Raises InvalidArgumentError for a size that no tensor has, or heads of q that are no multiple of those of k.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("batch", "q_len", "kv_len"):
            keep_count(self, name, 0)
        for name in ("q_heads", "kv_heads", "head_dim"):
            keep_count(self, name, 1)
        if self.q_heads % self.kv_heads:
            raise InvalidArgumentError(f"q_heads is {self.q_heads}; make it a multiple of kv_heads, {self.kv_heads}.")

    @property
    def group(self) -> int:
        """How many query heads share one key/value head: query head h uses key/value head h // group."""
        return self.q_heads // self.kv_heads

    @property
    def causal_offset(self) -> int:
        """Query i sees key j when j <= i + causal_offset: the last query sees the last key (bottom-right)."""
        return self.kv_len - self.q_len


def check_count(name: str, value: int, least: int) -> int:
    """Return `value` as an int; raise InvalidArgumentError unless it, the argument `name`, is one from `least`."""
    if type(value) is int and least <= value <= LARGEST_COUNT:
        return value  # nearly all: asking an abstract class takes a microsecond, and a decoding step asks often
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidArgumentError(f"{name} is {value!r}; give a whole number from {least}.")
    if int(value) > LARGEST_COUNT:
        raise InvalidArgumentError(f"{name} is above 2**62; give a whole number from {least} to that.")
    return int(value)


def keep_count(owner: object, name: str, least: int) -> None:
    """Check the attribute `name` of a frozen dataclass as `check_count` does, and keep it as a plain int.

    Of numpy's integers each product would have their width, and overflow in silence.
    """
    object.__setattr__(owner, name, check_count(name, getattr(owner, name), least))


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return `scale`, which must be a finite number, or 1/sqrt(head_dim) for None.

    Raises InvalidArgumentError for anything else: of NaN, one implementation makes NaN and another numbers.
    """
    if scale is None:
        return head_dim**-0.5
    return check_real("scale", scale, "a finite number, or None for 1/sqrt(head_dim)")


def check_real(name: str, value: float, wanted: str = "a finite number") -> float:
    """Return `value` as a float; raise InvalidArgumentError unless it, the argument `name`, is finite in float32."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            if abs(number := float(value)) <= _LARGEST_REAL:  # which no NaN is
                return number
        except OverflowError:
            pass  # a whole number beyond the largest float
    shown = value if isinstance(value, float) else f"of type {type(value).__name__}"
    if isinstance(value, float) and isfinite(value):
        shown = f"{value}, and float32 has room for {_LARGEST_REAL:g}"
    raise InvalidArgumentError(f"{name} is {shown}; give {wanted}.")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionShape:
    """Return the sizes of `q`, `k`, `v`, which must fit together.

    Raises InvalidArgumentError, naming the argument and both shapes, dtypes or devices, when they do not.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, " [batch, length, heads, head_dim]")
        if tensor.dim() != 4:
            raise InvalidArgumentError(
                f"{name} has shape {list(tensor.shape)}; attention needs [batch, length, heads, head_dim]."
            )
    check_dtypes_and_devices(q, k, v)
    batch, q_len, q_heads, head_dim = q.shape
    kv_batch, kv_len, kv_heads, _ = k.shape
    if kv_batch != batch:
        raise InvalidArgumentError(
            f"k has shape {list(k.shape)} and q {list(q.shape)}; their batch sizes, {kv_batch} and {batch}, "
            "must be equal."
        )
    check_heads(q, k)
    return AttentionShape(batch, q_len, kv_len, q_heads, kv_heads, head_dim)


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return what scores, statistics and sums of such input are computed in: float64 for float64, else float32."""
    import torch

    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_tensor(name: str, tensor: torch.Tensor, shape: str = "") -> None:
    """Raise InvalidArgumentError unless the argument `name` is a dense tensor; `shape` says of which shape to give one.

    Sparse and nested tensors have no strides, or no sizes.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{name} is of type {type(tensor).__name__}; give a tensor{shape}.")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise InvalidArgumentError(f"{name} is {kind}; give a dense tensor{shape}.")


def check_ints(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], device: torch.device | None = None
) -> None:
    """Raise InvalidArgumentError unless the argument `name` is an int32 tensor of `shape`, where None is any size.

    It must be on `device`; None: on any that holds numbers, as it will be read here.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{name} is of type {type(tensor).__name__}; give an int32 tensor.")
    fits = tensor.dim() == len(shape) and all(b in (None, a) for a, b in zip(tensor.shape, shape, strict=True))
    if tensor.dtype != torch.int32 or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidArgumentError(
            f"{name} has dtype {tensor.dtype} and shape {list(tensor.shape)}; it must be int32 of shape [{wanted}]."
        )
    if device is not None and tensor.device != device:
        raise InvalidArgumentError(f"{name} is on {tensor.device} and q on {device}; move one to the other.")
    check_real_device(name, tensor)


def check_real_device(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgumentError when the argument `name` is on the device meta."""
    if tensor.is_meta:
        raise InvalidArgumentError(f"{name} is on meta, where tensors hold no numbers; give one of a real device.")


def check_dtypes_and_devices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise InvalidArgumentError unless v is shaped like k and the three share a dtype to compute in and a device."""
    if not q.dtype.is_floating_point or q.element_size() < 2:
        raise InvalidArgumentError(f"q has dtype {q.dtype}; use float16, bfloat16, float32 or float64.")
    if v.shape != k.shape:
        raise InvalidArgumentError(f"v has shape {list(v.shape)} and k {list(k.shape)}; the two must be equal.")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InvalidArgumentError(f"{name} has dtype {tensor.dtype} and q {q.dtype}; convert one to the other.")
        if tensor.device != q.device:
            raise InvalidArgumentError(f"{name} is on {tensor.device} and q on {q.device}; move one to the other.")
    check_real_device("q", q)


def check_heads(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise InvalidArgumentError unless the last two sizes of q and k, heads and head_dim, fit together."""
    (q_heads, head_dim), (kv_heads, kv_head_dim) = q.shape[-2:], k.shape[-2:]
    both = f"k has shape {list(k.shape)} and q {list(q.shape)}"
    if kv_head_dim != head_dim or head_dim == 0:
        raise InvalidArgumentError(f"{both}; their last sizes, {kv_head_dim} and {head_dim}, must be equal and not 0.")
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise InvalidArgumentError(f"{both}; the {q_heads} heads of q must be a multiple of the {kv_heads} of k.")
