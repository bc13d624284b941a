"""What one run of the script asks for: the device, and sizes for a real run, a quick one, or a dry run on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# Processes that compile and check; each holds a CUDA context and takes about 2 GB of main memory.
_MOST_WORKERS = 8


@dataclass(frozen=True)
class Setting:
    """`device` is "cuda", or "cpu" for a dry run in Triton's interpreter."""

    device: str
    quick: bool = False

    @property
    def dry(self) -> bool:
        """Whether this is a dry run: the same code with tiny tensors, whose figures mean nothing."""
        return self.device == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """What is timed: bfloat16, and float32 in a dry run, as the interpreter has no bfloat16."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def repeats(self) -> int:
        """How often each call is timed."""
        return 1 if self.dry else 5 if self.quick else 10

    @property
    def workers(self) -> int:
        """How many processes check kernels side by side; none in a dry run, where they start slower than they work."""
        return 0 if self.dry else max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))

    def pick(self, full: T, quick: T, dry: T) -> T:
        """Return the value for this kind of run."""
        return dry if self.dry else quick if self.quick else full

    def randn(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        """Return normal numbers of `shape` on the device, the same ones each time."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.dtype)

    def qkv(self, batch: int, length: int, heads: int, head_dim: int, **options: Any) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, `[batch, length, heads, head_dim]` each."""
        return tuple(self.randn(batch, length, heads, head_dim, seed=seed, **options) for seed in range(3))

    def has_room(self, nbytes: float) -> bool:
        """Return whether the device has twice `nbytes` free, so that a measurement of such a size will not fail."""
        if self.dry:
            return True
        torch.cuda.empty_cache()  # what PyTorch keeps for later counts as taken otherwise
        return torch.cuda.mem_get_info()[0] > 2 * nbytes
