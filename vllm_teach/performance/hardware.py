"""What GPUs can do by their data sheets, and this machine by measurement, in one form that a cost model reads.

Rates are dense: where a data sheet counts the zeros that structured sparsity leaves out, half of it stands here. No
program attains them; what share of them it does is `cost_model.efficiency`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.links import Link, get_link

if TYPE_CHECKING:
    from vllm_teach.performance.machine import Machine

# Seconds between one kernel and the next when each is launched for itself: an assumption. Published measurements of a
# launch lie between 4 and 6 microseconds (https://susun-blog.com/blog/pegainfer-3-cuda-graph).
_LAUNCH = 5e-6
_KIB, _MIB = 1024, 1024**2


@dataclass(frozen=True)
class HardwareSpec:
    """One device. `peak` maps dtypes to dense FLOP/s ("int8": operations/s), `memory_bandwidth` is in bytes/s.

    `memory_bytes` are those that the driver reports; `l2_bytes` is the last cache before the memory,
    `shared_memory_bytes` the fast memory of one of the `num_sms` multiprocessors (0: a processor has none). `link`
    connects the device with its like, `host_link` with the host's memory. `kernel_launch` is an assumption, in seconds.
    `source` says where the figures are from.
    """

    name: str
    title: str
    peak: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    shared_memory_bytes: int
    num_sms: int
    link: Link
    host_link: Link
    kernel_launch: float
    source: str

    def peak_of(self, dtype: str) -> float:
        """Return the FLOP/s of `dtype`; raises InvalidArgumentError, listing what there is, where it has none."""
        if dtype not in self.peak:
            raise InvalidArgumentError(
                f"dtype={dtype!r} has no rate on {self.title}: use one of {', '.join(self.peak)}."
            )
        return self.peak[dtype]

    def ridge_point(self, dtype: str = "bfloat16") -> float:
        """Return the FLOPs per byte above which arithmetic is the limit, below which memory is."""
        return self.peak_of(dtype) / self.memory_bandwidth

    @classmethod
    def of(cls, machine: Machine) -> HardwareSpec:
        """Return what `measure_this_machine` found, in this form: its peaks are attained rates already.

        The links of a processor are this machine's own memory, over which processes would exchange tensors; what a hop
        takes is an assumption. Those of a GPU are not measured: PCIe 4 is assumed.
        """
        import psutil

        caches = list(machine.caches.values())
        on_cpu = machine.device == "cpu"
        memory, l2, shared, num_sms = (
            (psutil.virtual_memory().total, caches[-1] if caches else 0, 0, machine.threads) if on_cpu else _gpu_facts()
        )
        bandwidth = machine.copy_bandwidth.median
        return cls(
            name=f"this {machine.device}",
            title=machine.label,
            peak={dtype: rate.median for dtype, rate in machine.matmul.items()},
            memory_bytes=memory,
            memory_bandwidth=machine.read_bandwidth.median,
            l2_bytes=l2,
            shared_memory_bytes=shared,
            num_sms=num_sms,
            link=Link("memory", bandwidth, 30e-6) if on_cpu else get_link("pcie4"),
            host_link=Link("memory", bandwidth, 0.0) if on_cpu else get_link("pcie4"),
            kernel_launch=0.0 if on_cpu else _LAUNCH,
            source=f"measured on {machine.label} with torch {machine.torch_version}",
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain dicts, strings and numbers."""
        return {**asdict(self), "peak": dict(self.peak)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HardwareSpec:
        """Return what `to_json` was called on. Raises KeyError or TypeError for anything else."""
        return cls(**{**values, "link": Link(**values["link"]), "host_link": Link(**values["host_link"])})


def _gpu_facts() -> tuple[int, int, int, int]:
    """Return the bytes of memory, of L2 and of an SM's shared memory, and the number of SMs, as the driver has them."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return (
        found.total_memory,
        found.L2_cache_size,
        found.shared_memory_per_multiprocessor,
        found.multi_processor_count,
    )


def get_hardware(name: str) -> HardwareSpec:
    """Return the device called `name`. Raises InvalidArgumentError, listing all, when there is none."""
    if name not in HARDWARE:
        raise InvalidArgumentError(f"hardware={name!r} is not known: use one of {', '.join(HARDWARE)}.")
    return HARDWARE[name]


def hardware_names() -> tuple[str, ...]:
    """Return the names that `get_hardware` knows."""
    return tuple(HARDWARE)


def _gpu(
    name: str,
    title: str,
    *,
    tflops: tuple[float, float, float, float, float],
    memory_mib: int,
    gb_per_second: float,
    chip: tuple[int, int, int],
    links: tuple[str, str],
    source: str,
) -> HardwareSpec:
    """`tflops` of float32, tf32, 16-bit floats, int8 and float8 (0: none); `chip`: MiB of L2, KiB an SM, SMs."""
    float32, tf32, half, int8, float8 = (rate * 1e12 for rate in tflops)
    peak = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half, "int8": int8}
    return HardwareSpec(
        name=name,
        title=title,
        peak=peak | ({"float8": float8} if float8 else {}),
        memory_bytes=memory_mib * _MIB,
        memory_bandwidth=gb_per_second * 1e9,
        l2_bytes=chip[0] * _MIB,
        shared_memory_bytes=chip[1] * _KIB,
        num_sms=chip[2],
        link=get_link(links[0]),
        host_link=get_link(links[1]),
        kernel_launch=_LAUNCH,
        source=source,
    )


# Memory as NVML reports it, from the table in https://thundergolfer.com/blog/nvidia-gpu-memory-capacity (the RTX 4090's
# from nvidia-smi): a data sheet's "80 GB" are 80 GiB on an A100, and 79.6 GiB on an H100. Shared memory by compute
# capability: CUDA C++ programming guide, technical specifications (8.0: 164 KB, 8.9: 100 KB, 9.0: 228 KB).
_A100 = "NVIDIA A100 data sheet (1758950-r4, 2021) and Ampere architecture white paper (2020)"
_H100 = "NVIDIA H100 data sheet (2023) and Hopper architecture white paper (2022)"
_ADA = "NVIDIA Ada GPU architecture white paper, version 2.01 (2023)"
_AMPERE, _HOPPER, _HOPPER_PCIE = (19.5, 156, 312, 624, 0), (67, 494.5, 989.5, 1979, 1979), (51, 378, 756.5, 1513, 1513)
_GA100, _GH100 = (40, 164, 108), (50, 228, 132)

_ALL = (
    _gpu(
        "a100-40gb-pcie", "NVIDIA A100 40GB PCIe", tflops=_AMPERE, memory_mib=40_960, gb_per_second=1555,
        chip=_GA100, links=("pcie4", "pcie4"), source=_A100,
    ),
    _gpu(
        "a100-40gb-sxm", "NVIDIA A100 40GB SXM", tflops=_AMPERE, memory_mib=40_960, gb_per_second=1555,
        chip=_GA100, links=("nvlink3", "pcie4"), source=_A100,
    ),
    _gpu(
        "a100-80gb-pcie", "NVIDIA A100 80GB PCIe", tflops=_AMPERE, memory_mib=81_920, gb_per_second=1935,
        chip=_GA100, links=("pcie4", "pcie4"), source=_A100,
    ),
    _gpu(
        "a100-80gb-sxm", "NVIDIA A100 80GB SXM", tflops=_AMPERE, memory_mib=81_920, gb_per_second=2039,
        chip=_GA100, links=("nvlink3", "pcie4"), source=_A100,
    ),
    _gpu(
        "h100-80gb-pcie", "NVIDIA H100 80GB PCIe", tflops=_HOPPER_PCIE, memory_mib=81_559, gb_per_second=2000,
        chip=(50, 228, 114), links=("pcie5", "pcie5"), source=_H100,
    ),
    _gpu(
        "h100-80gb-sxm", "NVIDIA H100 80GB SXM", tflops=_HOPPER, memory_mib=81_559, gb_per_second=3350,
        chip=_GH100, links=("nvlink4", "pcie5"), source=_H100,
    ),
    _gpu(
        "h200-141gb-sxm", "NVIDIA H200 141GB SXM", tflops=_HOPPER, memory_mib=143_771, gb_per_second=4800,
        chip=_GH100, links=("nvlink4", "pcie5"), source="NVIDIA H200 data sheet (2024); the chip is the H100's",
    ),
    _gpu(
        "l4", "NVIDIA L4 24GB", tflops=(30.3, 60, 121, 242.5, 242.5), memory_mib=23_034, gb_per_second=300,
        chip=(48, 100, 58), links=("pcie4", "pcie4"), source=f"NVIDIA L4 data sheet (2023) and {_ADA}",
    ),
    _gpu(
        "rtx-4090", "NVIDIA GeForce RTX 4090", tflops=(82.6, 82.6, 165.2, 660.6, 330.3), memory_mib=24_564,
        gb_per_second=1008, chip=(72, 100, 128), links=("pcie4", "pcie4"),
        source=f"{_ADA}; 16- and 8-bit floats with float32 sums",
    ),
)  # fmt: skip
HARDWARE = {each.name: each for each in _ALL}
