"""What of a machine decides which backend serves: given as a value, so that a rule can be asked about any machine."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_teach.errors import InvalidArgumentError

# The oldest GPUs, by compute capability, that a library has kernels for.
OLDEST_GPU = {"flash_attn": (8, 0), "triton": (8, 0), "xformers": (7, 0)}

CPU_ISA_NAMES = {"avx2": "AVX2", "avx512": "AVX-512", "amx": "AMX"}

_GENERATIONS = {7: "Volta or Turing", 8: "Ampere or Ada", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}


@dataclass(frozen=True)
class Hardware:
    """A machine as the selection sees it.

    `cuda_capability` is the GPU's compute capability, None without one. `cpu_isa` names the instruction sets that
    count: "avx2", "avx512", "amx"; any collection of them will do. `unusable` holds (backend, reason) for those that
    cannot run here at all.

    Raises InvalidArgumentError for a capability that is no pair of whole numbers, or instruction sets that are no
    collection of names.
    """

    cuda_capability: tuple[int, int] | None = None
    cpu_isa: Collection[str] = frozenset()
    unusable: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        capability = self.cuda_capability
        if capability is not None:
            if not (isinstance(capability, Collection) and [type(part) for part in capability] == [int, int]):
                raise InvalidArgumentError(f"cuda_capability is {capability!r}; give a pair like (8, 0), or None.")
            object.__setattr__(self, "cuda_capability", tuple(capability))
        if isinstance(self.cpu_isa, str) or not isinstance(self.cpu_isa, Collection):
            raise InvalidArgumentError(f"cpu_isa is {self.cpu_isa!r}; give names like {{'avx2', 'avx512'}}.")
        object.__setattr__(self, "cpu_isa", frozenset(self.cpu_isa))  # hashable: selections are cached by machine
        pairs = self.unusable.items() if isinstance(self.unusable, dict) else self.unusable
        object.__setattr__(self, "unusable", tuple((name, reason) for name, reason in pairs))

    @property
    def has_tensor_cores(self) -> bool:
        """Whether the GPU multiplies matrices of 16-bit numbers in units of their own (Volta, 7.0, and newer)."""
        return self.cuda_capability is not None and self.cuda_capability >= (7, 0)

    def why_not(self, backend: str, device: str) -> str | None:
        """Return why `backend` cannot serve tensors on `device` ("cpu", "cuda") of this machine, or None."""
        for name, reason in self.unusable:
            if name == backend:
                return reason
        if device != "cuda":
            return None
        if self.cuda_capability is None:
            return "This machine has no CUDA GPU."
        oldest = OLDEST_GPU.get(backend, (0, 0))
        if self.cuda_capability < oldest:
            return (
                f"The GPU has compute capability {_dotted(self.cuda_capability)}; {backend} needs {_dotted(oldest)} "
                f"({_GENERATIONS[oldest[0]]}) or newer."
            )
        return None

    def describe(self, device: str) -> str:
        """Return a few words on `device`: "GPU of compute capability 9.0", "CPU with AVX2 and AVX-512"."""
        if device == "cuda":
            capability = "none" if self.cuda_capability is None else _dotted(self.cuda_capability)
            return f"GPU of compute capability {capability}"
        if device != "cpu":
            return f"device {device}"
        found = [word for name, word in CPU_ISA_NAMES.items() if name in self.cpu_isa]
        return f"CPU with {' and '.join(found)}" if found else "CPU without vector instructions that count"


@cache
def detect_hardware() -> Hardware:
    """Return this machine, looked at once per process: the backends' own reasons are asked for, too."""
    import torch

    from vllm_teach import backends

    unusable = tuple((name, reason) for name, reason in backends.availability().items() if reason is not None)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return Hardware(capability, detect_cpu_isa(), unusable)


def detect_cpu_isa() -> frozenset[str]:
    """Return the instruction sets that PyTorch uses here; ATEN_CPU_CAPABILITY can lower them."""
    import torch

    level = torch.backends.cpu.get_cpu_capability()
    found = {"AVX2": {"avx2"}, "AVX512": {"avx2", "avx512"}}.get(level, set())
    # Private, but the only way to ask; a PyTorch without it has no kernels for it either.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return frozenset(found | ({"amx"} if "avx512" in found and has_amx() else set()))


@cache
def cpu_name() -> str:
    """Return the processor's marketing name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
