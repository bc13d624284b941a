"""What an attention call asks for, and what a backend has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_teach.attention.shapes import AttentionShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionSpec(AttentionShape):
    """One attention call without its tensors: everything that decides which backends can serve it.

    `device` is the device's type ("cpu", "cuda"). `window`: see `Backend.run`.
    """

    dtype: torch.dtype
    device: str = "cpu"
    causal: bool = False
    window: int | None = None


class Backend(Protocol):
    """One attention implementation. Each module of this room but `spec`, `blind_rows` and `windows` is one."""

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
        causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention output, of q's shape `[batch, q_len, q_heads, head_dim]`.

        Causal masks are aligned bottom-right, and a row that sees no key gives 0, whatever the library underneath
        does. `window` narrows a causal mask to the last `window` keys, the query's own token's included. `scale` is a
        finite number, by default 1/sqrt(head_dim). A NaN in v may spread to rows that it is hidden from, as 0 · NaN is
        NaN: naive and sdpa spread it, tiled does not for the tiles that it skips.

        Raises InvalidArgumentError when the arguments do not fit together or the backend has no window, and
        MissingDependencyError when the library is not installed.
        """
