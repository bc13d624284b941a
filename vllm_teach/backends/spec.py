"""What an attention call asks for, and what a backend has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, Unpack, runtime_checkable

import torch

from vllm_teach.attention.layout import Layout, Paged, check_layout
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.shapes import AttentionShape, check_qkv
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class AttentionSpec(AttentionShape):
    """One attention call without its tensors: everything that decides which backends can serve it.

    With a layout, `batch` is the number of sequences and `q_len`, `kv_len` are those of the longest. `device` is the
    device's type ("cpu", "cuda"). `pattern` holds the causal mask and the window too; None shows all keys. `alibi` and
    `dropout` say whether the call has them, `block_size` the tokens of a block when `layout` is "paged".
    """

    dtype: torch.dtype
    device: str = "cpu"
    pattern: Pattern | None = None
    softcap: float = 0.0
    alibi: bool = False
    dropout: bool = False
    layout: Literal["dense", "varlen", "paged"] = "dense"
    block_size: int | None = None
    requires_grad: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError for a size that no tensor has, or a pattern without a hash."""
        super().__post_init__()
        _check_hash(self.pattern)

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layout: Layout | None = None,
        **arguments: Unpack[VariantArguments],
    ) -> AttentionSpec:
        """Return the spec of a call.

        Raises InvalidArgumentError when its arguments do not fit together, or its pattern has no hash.
        """
        return cls.with_variant(q, k, v, layout=layout, **arguments)[0]

    @classmethod
    def with_variant(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layout: Layout | None = None,
        **arguments: Unpack[VariantArguments],
    ) -> tuple[AttentionSpec, Variant]:
        """Return the spec of a call and its checked variant, from one look at the arguments. Raises as `of`."""
        shape = check_qkv(q, k, v) if layout is None else check_layout(q, k, v, layout).shape
        variant = Variant.of(shape, q.device, **arguments)
        kind: Literal["dense", "varlen", "paged"] = "dense"
        if layout is not None:
            kind = "paged" if isinstance(layout, Paged) else "varlen"
        spec = cls(
            **vars(shape),
            dtype=q.dtype,
            device=q.device.type,
            pattern=variant.pattern,
            softcap=variant.softcap,
            alibi=variant.alibi_slopes is not None,
            dropout=variant.dropout_p > 0,
            layout=kind,
            block_size=k.shape[1] if kind == "paged" else None,
            requires_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        )
        return spec, variant


def _check_hash(pattern: Pattern | None) -> None:
    """Choices and masks are kept by their spec and pattern, so that a model's layers share them."""
    try:
        hash(pattern)
    except TypeError as error:
        raise InvalidArgumentError(
            f"pattern is {pattern!r}, which has no hash ({error}); make its class a dataclass(frozen=True)."
        ) from error


class Backend(Protocol):
    """One attention implementation: a module of this room with these four names."""

    @property
    def name(self) -> str:
        """The name it is asked for by."""

    def unavailable(self) -> str | None:
        """Return why this machine cannot run the backend at all, or None when it can."""

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot serve such a call, or None when it can; says nothing about the machine."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layout: Layout | None = None,
        **arguments: Unpack[VariantArguments],
    ) -> torch.Tensor:
        """Return the attention output, of q's shape and dtype; nothing is mutated.

        Without `layout`, q is `[batch, q_len, q_heads, head_dim]`; see `attention.layout` for the others, and
        `attention.variant.Variant` for the keyword arguments. Masks are aligned bottom-right, and a row that sees no
        key gives 0, whatever the library underneath does. A NaN in v may spread to rows that it is hidden from, as
        0 · NaN is NaN; what lies behind a sequence's last key in a paged cache never does.

        Raises InvalidArgumentError when the arguments do not fit together or the backend does not support them, and
        MissingDependencyError when its library is not installed.
        """


# Attention of q, k and v, whose layout and variant are settled.
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@runtime_checkable
class Preparing(Protocol):
    """A backend that can work out once what many calls have in common (FlashInfer's plan and run).

    The layers of a model attend with the same lengths, block tables and masks; only the numbers in q, k and v differ.
    """

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layout: Layout | None = None,
        **arguments: Unpack[VariantArguments],
    ) -> Run:
        """Return `Backend.run` for tensors with the dtype, shape and strides of these; raises what `run` raises.

        `layout` and what is in it must not change until the last call. The calls themselves raise
        InvalidArgumentError for other tensors, and serve one thread at a time.
        """
