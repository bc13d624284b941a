"""What an attention call asks for, and what a backend has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_teach.attention.shapes import check_qkv

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionSpec:
    """One attention call without its tensors: everything that decides which backends can serve it.

    `device` is the device's type ("cpu", "cuda"). `needs_lse`: the caller also wants the log-sum-exp.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str = "cpu"
    causal: bool = False
    needs_lse: bool = False

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, needs_lse: bool = False
    ) -> AttentionSpec:
        """Return the spec of a call with these tensors.

        Raises InvalidArgumentError when they do not fit together.
        """
        shape = check_qkv(q, k, v)
        return cls(
            batch=shape.batch,
            q_len=shape.q_len,
            kv_len=shape.kv_len,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=q.dtype,
            device=q.device.type,
            causal=causal,
            needs_lse=needs_lse,
        )


class Backend(Protocol):
    """One attention implementation. Each module of this room but `spec` and `blind_rows` is one.

    A backend for which `supports` accepts `needs_lse` also has `run_with_lse`, with `run`'s arguments, returning
    (out, lse `[batch, q_heads, q_len]`).
    """

    @property
    def name(self) -> str:
        """The name it is asked for by."""

    def unavailable(self) -> str | None:
        """Return why this machine cannot run the backend at all, or None when it can."""

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot serve such a call, or None when it can; says nothing about the machine."""

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
    ) -> torch.Tensor:
        """Return the attention output, of q's shape `[batch, q_len, q_heads, head_dim]`.

        Causal masks are aligned bottom-right, and a row that sees no key gives 0, whatever the library underneath
        does. Raises InvalidArgumentError when the tensors do not fit together, and MissingDependencyError when the
        library is not installed.
        """
