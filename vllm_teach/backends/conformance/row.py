"""One call of the table: its sizes and options, from which its tensors follow, the same ones each time."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from vllm_teach.attention.layout import Layout
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.conformance.packing import PACKERS, Sequence, moved
from vllm_teach.backends.spec import AttentionSpec

_SEED = 1234567890123  # more than 32 bits, as a dropout seed may have


class Inputs(NamedTuple):
    """The arguments of one call: `run(q, k, v, layout=layout, **arguments)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Layout | None
    arguments: VariantArguments


@dataclass(frozen=True)
class Row:
    """One call of the table. `lengths` are (q_len, kv_len) of each sequence; `alibi` says whose slopes there are."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    layout: Literal["dense", "varlen", "paged"] = "dense"
    block_size: int | None = None
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    pattern: Pattern | None = None
    softcap: float = 0.0
    alibi: Literal["none", "heads", "sequences"] = "none"
    dropout_p: float = 0.0
    scale: float | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are asked for: not of a cache, which is only read."""
        return self.layout != "paged"

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """Return the call's arguments, the same numbers each time. What no sequence owns in a paged cache is NaN."""
        q, k, v, layout = PACKERS[self.layout](self.sequences(), self.block_size)
        return Inputs(q.to(device), k.to(device), v.to(device), moved(layout, device), self.arguments(device))

    def sequences(self) -> list[Sequence]:
        """Return the numbers of each sequence, on the CPU in the row's dtype."""
        return [Sequence(*(self._draw(i, part) for part in "qkv")) for i in range(len(self.lengths))]

    def upstream(self) -> list[torch.Tensor]:
        """Return a gradient of each sequence's output, as `sequences`."""
        return [self._draw(i, "d") for i in range(len(self.lengths))]

    def _draw(self, index: int, part: str) -> torch.Tensor:
        q_len, kv_len = self.lengths[index]
        size = (q_len, self.heads[0]) if part in "qd" else (kv_len, self.heads[1])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {index} {part}".encode()))
        return torch.randn(*size, self.head_dim, dtype=torch.float64, generator=generator).to(self.dtype)

    def _slopes(self) -> torch.Tensor:
        """ALiBi's own slopes, 2 ** (-8 h / q_heads); those of sequence i are divided by i + 1."""
        heads = self.heads[0]
        slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)  # float32 [q_heads]
        if self.alibi == "heads":
            return slopes
        return slopes / (torch.arange(len(self.lengths))[:, None] + 1)  # [sequences, q_heads]

    def arguments(self, device: torch.device | str = "cpu") -> VariantArguments:
        """Return the keyword arguments of the call."""
        slopes = None if self.alibi == "none" else self._slopes().to(device)
        return VariantArguments(
            causal=self.causal,
            scale=self.scale,
            window_size=self.window_size,
            pattern=self.pattern,
            softcap=self.softcap,
            alibi_slopes=slopes,
            dropout_p=self.dropout_p,
            dropout_seed=_SEED if self.dropout_p else None,
        )

    def spec(self, device: torch.device | str = "cpu", requires_grad: bool = False) -> AttentionSpec:
        """Return the spec of the call, or of the same call with q, k and v that need a gradient."""
        inputs = self.inputs(device)
        q = inputs.q.requires_grad_(requires_grad)
        return AttentionSpec.of(q, inputs.k, inputs.v, layout=inputs.layout, **inputs.arguments)
