"""A model of how long a step of the engine takes, and of what fits a device: by arithmetic, on any hardware.

    operators     the FLOPs, bytes and calls of a step
    memory        weights, activations and KV cache of a device
    links         what tensors cost between devices
    efficiency    which share of a device's rates is attained
    step_cost     all of it as the seconds of a plan
    fit, tune     the shares that this machine attains, from measured steps

The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Attained": "efficiency",
    "Efficiency": "efficiency",
    "assumed_efficiency": "efficiency",
    "Fit": "fit",
    "Link": "links",
    "get_link": "links",
    "DeviceMemory": "memory",
    "split_device_memory": "memory",
    "weight_bytes": "memory",
    "ModelledStep": "step_cost",
    "StepShape": "step_shape",
    "load_fit": "tune",
    "tune_steps": "tune",
    "WeightFormat": "weight_format",
    "get_weight_format": "weight_format",
}

__all__ = [
    "Attained",
    "DeviceMemory",
    "Efficiency",
    "Fit",
    "Link",
    "ModelledStep",
    "StepShape",
    "WeightFormat",
    "assumed_efficiency",
    "get_link",
    "get_weight_format",
    "load_fit",
    "split_device_memory",
    "tune_steps",
    "weight_bytes",
]

if TYPE_CHECKING:
    from vllm_teach.performance.cost_model.efficiency import Attained, Efficiency, assumed_efficiency
    from vllm_teach.performance.cost_model.fit import Fit
    from vllm_teach.performance.cost_model.links import Link, get_link
    from vllm_teach.performance.cost_model.memory import (
        DeviceMemory,
        split_device_memory,
        weight_bytes,
    )
    from vllm_teach.performance.cost_model.step_cost import ModelledStep
    from vllm_teach.performance.cost_model.step_shape import StepShape
    from vllm_teach.performance.cost_model.tune import load_fit, tune_steps
    from vllm_teach.performance.cost_model.weight_format import WeightFormat, get_weight_format


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
