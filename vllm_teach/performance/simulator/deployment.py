"""A model on hardware that need not be there: what a step costs, how much cache there is, and the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from vllm_teach.engine.assembly import make_scheduler_config
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.field_checks import check_whole
from vllm_teach.engine.limits import check_limits, choose_max_model_len
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.placement import longest_sequence
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.language_model import LanguageModel
from vllm_teach.performance.cost_model.efficiency import Efficiency
from vllm_teach.performance.cost_model.fit import Fit
from vllm_teach.performance.cost_model.links import get_link
from vllm_teach.performance.cost_model.memory import DeviceMemory, split_device_memory
from vllm_teach.performance.cost_model.step_cost import ModelledStep
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.tune import load_fit, stored_weights
from vllm_teach.performance.cost_model.weight_format import WeightFormat, element_bytes, get_weight_format
from vllm_teach.performance.hardware import HARDWARE, HardwareSpec
from vllm_teach.performance.model_shapes import SHAPES, get_model_shape
from vllm_teach.performance.simulator.traffic import Traffic
from vllm_teach.performance.virtual_time import Cost, Simulation, Watch, simulate

# Fields of an EngineConfig that a simulation has no use for: it has no tensors, and keeps the events it is asked for.
_OF_TENSORS = (
    "kv_cache_memory_bytes",
    "attention_backend",
    "attention_pattern",
    "kv_cache_dtype",
    "swap_file",
    "seed",
    "max_events",
)
SETTINGS = tuple(each.name for each in fields(EngineConfig) if each.name not in _OF_TENSORS)
THIS = "this"
_MOST_HOST_BLOCKS = 10**7  # of which the cache keeps a list
_MAX_NUM_SEQS = 256  # vLLM's default; that of our own engine is for two cores


@dataclass(frozen=True)
class Deployment:
    """A model of the `shape` called `model` on `tensor_parallel_size` devices; `cost` says what a step takes.

    `engine` has the settings, by the names and rules of the real engine, and `memory` what each device holds.
    """

    model: str
    shape: ModelConfig
    hardware: HardwareSpec
    tensor_parallel_size: int
    dtype: str
    quantization: str | None
    engine: EngineConfig
    memory: DeviceMemory
    cost: Cost

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache: as many as fit, or `num_kv_blocks` of the settings."""
        return self.engine.num_kv_blocks or self.memory.num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks that fit into the swap space, which all devices share."""
        return int(self.engine.swap_space * 2**30) // (self.memory.block_bytes * self.tensor_parallel_size)

    @property
    def max_model_len(self) -> int:
        """How many tokens prompt and output may have together. Raises InvalidArgumentError if settings ask for more."""
        most = longest_sequence(self.engine.kv_placement, self.num_blocks) * self.engine.block_size
        return choose_max_model_len(self.engine, self.shape, most)

    @property
    def cost_source(self) -> str:
        """Where the seconds of a step come from: assumed or measured efficiency, or a cost that was given."""
        return self.cost.efficiency.source if isinstance(self.cost, ModelledStep) else f"given: {self.cost!r}"

    def simulate(self, traffic: Traffic, *, watch: Watch | None = None, max_events: int | None = None) -> Simulation:
        """Serve `traffic`; see `virtual_time.simulate`. Raises InvalidArgumentError for a request that is too long."""
        config, most = self.engine, self.max_model_len
        if traffic.longest > most:
            raise InvalidArgumentError(
                f"a request has {traffic.longest} tokens, prompt and output, but max_model_len is {most}: give shorter "
                "ones, or a deployment that takes them."
            )
        scheduler = make_scheduler_config(config, self._as_model(), most)
        return simulate(
            traffic.arrivals,
            self.cost,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            num_host_blocks=self.num_host_blocks,
            prefix_cache=config.prefix_cache if config.enable_prefix_caching else None,
            eviction=config.eviction_policy,
            placement=config.kv_placement,
            watch=watch,
            max_events=max_events,
            **{each.name: getattr(scheduler, each.name) for each in fields(scheduler)},
        )

    def to_json(self) -> dict[str, object]:
        """Return it as plain data; sizes in bytes, of one device."""
        return {
            "model": self.model,
            "hardware": self.hardware.to_json(),
            "tensor_parallel_size": self.tensor_parallel_size,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "efficiency": self.cost.efficiency.to_json() if isinstance(self.cost, ModelledStep) else None,
            "cost_source": self.cost_source,
            "max_model_len": self.max_model_len,
            "memory_of_a_device": {
                "total": self.memory.total,
                "usable": self.memory.usable,
                "weights": self.memory.weights,
                "activations": self.memory.activations,
                "kv_cache": self.num_blocks * self.memory.block_bytes,
            },
            "num_blocks": self.num_blocks,
            "num_host_blocks": self.num_host_blocks,
            "settings": {name: getattr(self.engine, name) for name in SETTINGS if name != "preemption_costs"},
        }

    def _as_model(self) -> LanguageModel:
        """What the scheduler's settings depend on of a model: its shape, and the bytes of a number."""
        return cast(LanguageModel, SimpleNamespace(config=self.shape, dtype=getattr(torch, self.dtype)))


def deploy(
    model: str | Path,
    hardware: str | HardwareSpec,
    *,
    tensor_parallel_size: int = 1,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    attention: str = "paged",
    link: str | None = None,
    efficiency: Efficiency | None = None,
    cost: Cost | None = None,
    **settings: Any,
) -> Deployment:
    """Put a model on devices, without either of them. Everything that follows from it is modelled.

    `model` is the name of a published shape, an alias or a folder; `hardware` the name of a device, its figures, or
    "this" for what `vllm-teach tune --steps` found here. `quantization` is the weights' ("int8", "awq", "gptq",
    "rtn"; None: not at all, or as in the model's folder), `attention` the algorithm ("naive", "tiled", "paged"),
    `link` what connects the devices, None for the hardware's own. `efficiency` is the share of the peaks that is
    attained, None the assumptions for a GPU; `cost` takes the place of the whole model of a step. `settings` are
    SETTINGS, fields of EngineConfig with its defaults, but for `max_num_seqs`, which is 256.

    Raises InvalidArgumentError for what is not known, listing what there is, and for a model that does not fit.
    """
    unknown = next((name for name in settings if name not in SETTINGS), None)
    if unknown is not None:
        raise InvalidArgumentError(f"{unknown} is no setting of a simulation: use {', '.join(SETTINGS)}.")
    check_whole("tensor_parallel_size", tensor_parallel_size, 1)
    element_bytes(dtype)  # raises for one that is none
    engine = EngineConfig(**{"max_num_seqs": _MAX_NUM_SEQS, **settings})
    shape = get_model_shape(model)
    if hardware == THIS:
        fit = _fit_of_this_machine(dtype)
        hardware, efficiency = fit.hardware, fit.efficiency if efficiency is None else efficiency
    spec = _find_hardware(hardware) if isinstance(hardware, str) else hardware
    weights = _weights(model, quantization, dtype)
    check_limits(engine, shape, getattr(torch, dtype), torch.device("cpu"))  # of a backend, "auto", it asks nothing
    memory = split_device_memory(
        shape,
        spec,
        dtype=dtype,
        weights=weights,
        tensor_parallel_size=tensor_parallel_size,
        block_size=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        attention=attention,
    )
    _check_blocks(engine, memory, tensor_parallel_size)
    modelled = ModelledStep(
        shape,
        spec,
        efficiency,
        dtype=dtype,
        weights=weights,
        attention=attention,
        tensor_parallel_size=tensor_parallel_size,
        link=None if link is None else get_link(link),
    )
    if engine.preemption_costs is None:
        engine = replace(engine, preemption_costs=_preemption_costs(modelled, memory, engine))
    stored = weights.name if weights.quantized else None
    return Deployment(str(model), shape, spec, tensor_parallel_size, dtype, stored, engine, memory, cost or modelled)


def _find_hardware(name: str) -> HardwareSpec:
    if name not in HARDWARE:
        raise InvalidArgumentError(
            f"hardware={name!r} is not known: use one of {', '.join(HARDWARE)}, or {THIS!r} for this machine."
        )
    return HARDWARE[name]


def _check_blocks(engine: EngineConfig, memory: DeviceMemory, devices: int) -> None:
    """Refuse blocks that no real engine could have: more than fit, or a swap space without one."""
    if engine.num_kv_blocks is not None and engine.num_kv_blocks > memory.num_blocks:
        raise InvalidArgumentError(
            f"num_kv_blocks={engine.num_kv_blocks} does not fit: weights and steps leave each device room for "
            f"{memory.num_blocks:,} blocks of {engine.block_size} tokens, so use at most that or leave it out."
        )
    block = memory.block_bytes * devices
    if engine.swap_space * 2**30 / block > _MOST_HOST_BLOCKS:
        most = _MOST_HOST_BLOCKS * block / 2**30
        raise InvalidArgumentError(
            f"swap_space={engine.swap_space} is more than {_MOST_HOST_BLOCKS:,} blocks: use at most {most:,.0f} GiB."
        )
    if 0 < engine.swap_space * 2**30 < block:
        raise InvalidArgumentError(
            f"swap_space={engine.swap_space} is less than one block of {block:,} bytes: use 0 or more GiB."
        )


def _fit_of_this_machine(dtype: str) -> Fit:
    return load_fit("cuda" if torch.cuda.is_available() else "cpu", dtype)


def _weights(model: str | Path, quantization: str | None, dtype: str) -> WeightFormat:
    """A model that is here has the weights of its files, unless others are asked for."""
    found = stored_weights(model) if quantization is None and str(model) not in SHAPES else None
    return get_weight_format(quantization, dtype) if found is None else found


def _preemption_costs(step: ModelledStep, memory: DeviceMemory, engine: EngineConfig) -> PreemptionCosts:
    """What preemption_mode="auto" weighs: a prompt in a step of its own, as large as steps get, and the host's link."""
    tokens = max(2, engine.max_num_batched_tokens)
    prefill = step.parts_of(StepShape(1, tokens, 1, chunks=((0, tokens),)), engine.block_size)
    return PreemptionCosts(
        prefill_seconds_per_token=sum(prefill.values()) / tokens,
        kv_bytes_per_token=memory.block_bytes / engine.block_size,  # of one device, which has a link of its own
        swap_bytes_per_second=step.hardware.host_link.bandwidth * step.efficiency.link,
    )
