"""How long a step takes on a device, from its work and from what the device attains. Modelled."""

from __future__ import annotations

import copy

from vllm_teach.engine.plan import Plan
from vllm_teach.models.config import ModelConfig
from vllm_teach.performance.cost_model.attention_work import Work
from vllm_teach.performance.cost_model.efficiency import Efficiency, assumed_efficiency
from vllm_teach.performance.cost_model.links import Link
from vllm_teach.performance.cost_model.operators import Operators
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.weight_format import WeightFormat
from vllm_teach.performance.hardware import HardwareSpec


class ModelledStep:
    """The seconds of a step of the model `config` on `tensor_parallel_size` devices of `hardware`.

    A `virtual_time` cost. `efficiency` None assumes that of well-made GPU kernels; `link` None is the hardware's own.
    The other arguments are `Operators`'. Device and host take turns, as in this package's engine: nothing of a step's
    bookkeeping hides behind its kernels. Raises InvalidArgumentError as `Operators`, and for a `dtype` that the
    hardware has no rate for.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: HardwareSpec,
        efficiency: Efficiency | None = None,
        *,
        dtype: str = "bfloat16",
        weights: WeightFormat | None = None,
        attention: str = "paged",
        tensor_parallel_size: int = 1,
        link: Link | None = None,
    ) -> None:
        self.config, self.hardware = config, hardware
        self.efficiency = assumed_efficiency(hardware) if efficiency is None else efficiency
        self.operators = Operators(config, dtype, weights, attention, tensor_parallel_size)
        self.link = hardware.link if link is None else link
        self.peak = hardware.peak_of(dtype)

    def with_efficiency(self, efficiency: Efficiency) -> ModelledStep:
        """Return the same step where this is attained."""
        other = copy.copy(self)
        other.efficiency = efficiency
        return other

    def seconds(self, plan: Plan, block_size: int) -> float:
        """Return the modelled seconds of `plan`, in a cache with blocks of `block_size` tokens."""
        return sum(self.parts(plan, block_size).values())

    def parts(self, plan: Plan, block_size: int) -> dict[str, float]:
        """Return the modelled seconds of `plan` by kind of work; they add up to `seconds`.

        Kinds are those of OPERATORS, "calls", "communication", "transfers", "step" and "sequences"; what there is none
        of is left out.
        """
        return self.parts_of(StepShape.of(plan.items, plan.transfers, self.config.sliding_window), block_size)

    def parts_of(self, shape: StepShape, block_size: int) -> dict[str, float]:
        """Return what `parts` does, for a step of this shape."""
        efficiency, hardware, operators = self.efficiency, self.hardware, self.operators
        calls, parts = 0, {}
        for kind, work in operators.work(shape).items():
            parts[kind] = efficiency.attained[kind].seconds(work, self.peak, hardware.memory_bandwidth)
            calls += work.calls
        parts["calls"] = calls * efficiency.call
        if operators.size > 1:
            parts["communication"] = self._communication_seconds(shape)
        if shape.swapped_blocks or shape.copied_blocks:
            parts["transfers"] = self._transfer_seconds(shape, block_size)
        parts["step"] = efficiency.step
        parts["sequences"] = shape.sequences * efficiency.sequence
        return parts

    def _communication_seconds(self, shape: StepShape) -> float:
        calls, summed = self.operators.all_reduced(shape)
        gathered, devices, share = self.operators.gathered_bytes(shape), self.operators.size, self.efficiency.link
        seconds = self.link.all_reduce_seconds(summed / share, devices, calls)
        return seconds + (self.link.gather_seconds(gathered / share, devices) if gathered else 0.0)

    def _transfer_seconds(self, shape: StepShape, block_size: int) -> float:
        """A swapped block crosses the link to the host, a copied one is read and written."""
        block = Work(0.0, block_size * self.operators.local.kv_bytes_per_token(self.operators.element))
        copied = self.efficiency.attained["cache writes"].seconds(
            block._replace(num_bytes=2 * shape.copied_blocks * block.num_bytes),
            self.peak,
            self.hardware.memory_bandwidth,
        )
        swapped = shape.swapped_blocks * block.num_bytes / (self.hardware.host_link.bandwidth * self.efficiency.link)
        return copied + swapped
