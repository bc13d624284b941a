"""What a step costs when several engines share one device. Modelled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_teach.engine.plan import Plan
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.virtual_time import StepCost


@dataclass(frozen=True)
class SharedDeviceCost(StepCost):
    """The seconds of a step of one of `workers` engines that take turns on a device, all of them busy.

    The other fields are the device's part of a step, and `host` is the rest: scheduling, sampling, sending, in which
    the device stands still unless another engine has work for it. An engine's turn comes again when all have had
    theirs, or when its own host part is done, whichever is later. Nobody's part slows another's down, which favours
    many workers.
    """

    workers: int = 1
    host: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers < 1 or not (math.isfinite(self.host) and self.host >= 0):
            raise InvalidArgumentError(
                f"workers={self.workers!r}, host={self.host!r} is no sharing: use a number from 1, and seconds from 0."
            )

    def seconds(self, plan: Plan, block_size: int) -> float:
        """Return the modelled seconds from one step's begin to the next one's."""
        device = super().seconds(plan, block_size)
        return max(self.workers * device, device + self.host)
