"""What a timing belongs to: the processor or GPU, its threads, PyTorch's version; and the file named after them."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

from vllm_teach.backends.hardware import detect_cpu_isa
from vllm_teach.kernels.cpu_build import cache_folder

_FORMAT = "1"  # of the file: another one is not read


def describe_machine(device: str) -> dict[str, str]:
    """Return what timings on `device` ("cpu" or "cuda") depend on, as words."""
    if device == "cuda":
        return {"processor": torch.cuda.get_device_name(), "torch": f"torch {torch.__version__}"}
    isa = " ".join(sorted(detect_cpu_isa()))
    threads = torch.get_num_threads()
    return {
        "processor": cpu_name(),
        "instructions": isa or "no vector instructions",
        "threads": f"{threads} thread{'s' * (threads != 1)}",
        "torch": f"torch {torch.__version__}",
    }


def tuning_file(device: str) -> Path:
    """Return where the timings of this machine are kept; another processor, thread count or PyTorch has another one."""
    key = hashlib.sha256("\0".join([_FORMAT, device, *describe_machine(device).values()]).encode()).hexdigest()[:16]
    return cache_folder().parent / "tuning" / f"{device}-{key}.json"


@cache
def cpu_name() -> str:
    """Return the processor's marketing name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            return asked.stdout.strip()
    return platform.processor() or platform.machine()
