"""A fault in another rank's forward pass, when the test wants it."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_teach.attention.patterns import Pattern


@dataclass(frozen=True)
class Trap(Pattern):
    """A pattern that hides nothing, and in processes other than `driver` does, once, what the file `order` says."""

    driver: int
    order: str

    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        order = Path(self.order)
        if os.getpid() != self.driver and order.exists():
            what = order.read_text()
            order.unlink()
            if what in ("raise", "memory"):
                raise (RuntimeError if what == "raise" else MemoryError)("caught in the trap")
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
        return torch.ones_like(k_pos, dtype=torch.bool)
