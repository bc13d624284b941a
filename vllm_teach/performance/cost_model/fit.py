"""Finds what a machine attains from measured steps: the `Efficiency` under which modelled steps come closest.

A step is taken for a sum of terms (`TERMS`), each an amount of work times a cost that is the same in all steps. Costs
are found by least squares on relative errors and are never negative. What a few steps of one model cannot tell apart is
not fitted: what goes element by element is taken to run at the measured bandwidth. Which of arithmetic and memory sets
the pace of a matrix product, and how much of the other one shows, makes the sum bend; both are tried out on a grid.

The seconds of a step are firmer than what they are made of. In synthetic steps with 5 % of noise, those of scripts that
were left out are told within 4 % (3 % of those fitted to); but what a call costs, which two models alone tell, came out
between 0.3 and 11 microseconds for a true 9, with what a step costs beside it making up for the difference.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.performance.cost_model.attention_work import Work
from vllm_teach.performance.cost_model.efficiency import Attained, Efficiency
from vllm_teach.performance.cost_model.non_negative import non_negative_least_squares
from vllm_teach.performance.cost_model.operators import OPERATORS
from vllm_teach.performance.cost_model.step_cost import ModelledStep
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.training_steps import TrainingPoint
from vllm_teach.performance.cost_model.weight_format import WeightFormat
from vllm_teach.performance.hardware import HardwareSpec

# Seconds of a step, of a sequence in it, of a call, of a matrix product's FLOP and byte, of a byte that attention reads
# while decoding, and of a FLOP of attention over a prompt.
TERMS = ("step", "sequence", "call", "product FLOP", "product byte", "decode byte", "prefill FLOP")
_PRODUCTS = ("linear layers", "logits")
_FITTED = (*_PRODUCTS, "decode attention", "prefill attention")
_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
_RIDGES = tuple(2.0**power for power in range(13))  # FLOPs per byte
_LEAST_POINTS = 2 * len(TERMS)


@dataclass(frozen=True)
class Residual:
    """A measured step: its median seconds, the lowest and the highest, and those that the fitted model gives it."""

    model: str
    script: str
    shape: StepShape
    seconds: float
    low: float
    high: float
    modelled: float

    @property
    def error(self) -> float:
        """What the model errs by, as a share of what was measured; above 0 where it is too slow."""
        return self.modelled / self.seconds - 1


@dataclass(frozen=True)
class Fit:
    """What was found on `hardware`, for models computed in `dtype`, and every point that it was found from.

    `machine` is `backends.tuning_file.describe_machine`'s, `provenance` the versions and the settings measured with.
    """

    machine: Mapping[str, str]
    hardware: HardwareSpec
    dtype: str
    efficiency: Efficiency
    residuals: tuple[Residual, ...]
    provenance: Mapping[str, Any]

    @property
    def median_error(self) -> float:
        """The median of the points' errors, without their signs."""
        return statistics.median(abs(each.error) for each in self.residuals)

    def step_cost(self, config: ModelConfig, weights: WeightFormat | None = None) -> ModelledStep:
        """Return the modelled step of a model on the machine that was measured."""
        return ModelledStep(config, self.hardware, self.efficiency, dtype=self.dtype, weights=weights)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, strings and numbers."""
        return {
            "machine": dict(self.machine),
            "hardware": self.hardware.to_json(),
            "dtype": self.dtype,
            "efficiency": self.efficiency.to_json(),
            "residuals": [asdict(each) for each in self.residuals],
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fit:
        """Return what `to_json` was called on. Raises KeyError, TypeError or ValueError for anything else."""

        def residual(each: Mapping[str, Any]) -> Residual:
            shape = each["shape"]
            chunks = tuple((start, count) for start, count in shape["chunks"])
            return Residual(**{**each, "shape": StepShape(**{**shape, "chunks": chunks})})

        return cls(
            machine=values["machine"],
            hardware=HardwareSpec.from_json(values["hardware"]),
            dtype=values["dtype"],
            efficiency=Efficiency.from_json(values["efficiency"]),
            residuals=tuple(map(residual, values["residuals"])),
            provenance=values["provenance"],
        )


def fit_steps(
    points: Sequence[TrainingPoint], models: Mapping[str, ModelledStep]
) -> tuple[Efficiency, tuple[Residual, ...]]:
    """Return the efficiency under which the points' steps are modelled best, and what is left of each.

    `models` has a modelled step, whatever its efficiency, for each model that the points name, all on one hardware and
    in one dtype. Raises InvalidArgumentError for fewer than 14 points, which would leave nothing to judge the fit by.
    """
    if len(points) < _LEAST_POINTS:
        raise InvalidArgumentError(
            f"points has {len(points)} steps for {len(TERMS)} terms: measure at least {_LEAST_POINTS}."
        )
    any_model = next(iter(models.values()))
    hardware, peak = any_model.hardware, any_model.peak
    works = [models[point.model].operators.work(point.shape) for point in points]
    measured = np.array([point.seconds.median for point in points])
    fixed = np.array([_fixed_bytes(work) for work in works]) / hardware.memory_bandwidth
    least, best = math.inf, (any_model.efficiency, measured)
    for overlap, ridge in itertools.product(_OVERLAPS, _RIDGES):
        columns = np.array([_amounts(*each, overlap, ridge) for each in zip(points, works, strict=True)])
        costs = non_negative_least_squares(columns / measured[:, None], 1 - fixed / measured)
        found = _efficiency(dict(zip(TERMS, costs.tolist(), strict=True)), overlap, peak, hardware)
        # Judged by the model itself, which takes the longer of the two whatever the ridge was taken for.
        told = {name: model.with_efficiency(found) for name, model in models.items()}
        modelled = np.array([sum(told[each.model].parts_of(each.shape, 1).values()) for each in points])
        error = float(((modelled / measured - 1) ** 2).sum())
        if error < least:
            least, best = error, (found, modelled)
    efficiency, modelled = best
    return efficiency, tuple(
        Residual(each.model, each.script, each.shape, each.seconds.median, each.seconds.low, each.seconds.high, seconds)
        for each, seconds in zip(points, modelled.tolist(), strict=True)
    )


def _fixed_bytes(work: Mapping[str, Work]) -> float:
    return sum(each.num_bytes for kind, each in work.items() if kind not in _FITTED)


def _amounts(point: TrainingPoint, work: Mapping[str, Work], overlap: float, ridge: float) -> list[float]:
    """Return how much of each of TERMS a step has, if products of more than `ridge` FLOPs per byte are arithmetic's."""
    flops = num_bytes = 0.0
    for kind in _PRODUCTS:
        if kind in work:
            arithmetic = work[kind].flops > ridge * work[kind].num_bytes
            flops += work[kind].flops * (1 if arithmetic else 1 - overlap)
            num_bytes += work[kind].num_bytes * (1 - overlap if arithmetic else 1)
    return [
        1.0,
        float(point.shape.sequences),
        float(sum(each.calls for each in work.values())),
        flops,
        num_bytes,
        work.get("decode attention", Work()).num_bytes,
        work.get("prefill attention", Work()).flops,
    ]


def _efficiency(costs: Mapping[str, float], overlap: float, peak: float, hardware: HardwareSpec) -> Efficiency:
    """Turn costs into shares of the hardware's rates; what costs nothing has an infinite one."""

    def share(cost: float, rate: float) -> float:
        return 1 / (cost * rate) if cost > 0 else math.inf

    bandwidth = hardware.memory_bandwidth
    products = Attained(share(costs["product FLOP"], peak), share(costs["product byte"], bandwidth), overlap)
    attained = dict.fromkeys(OPERATORS, Attained(math.inf, 1.0)) | {
        "linear layers": products,
        "logits": products,
        "decode attention": Attained(math.inf, share(costs["decode byte"], bandwidth)),
        "prefill attention": Attained(share(costs["prefill FLOP"], peak), math.inf),
    }
    source = f"fitted to steps measured on {hardware.title}"
    return Efficiency(attained, costs["call"], costs["step"], costs["sequence"], link=1.0, source=source)
