"""What a timing belongs to: the processor or GPU, its threads, PyTorch's version; and the file named after them."""

from __future__ import annotations

import hashlib
import platform
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
        "processor": _processor(),
        "instructions": isa or "no vector instructions",
        "threads": f"{threads} thread{'s' * (threads != 1)}",
        "torch": f"torch {torch.__version__}",
    }


def tuning_file(device: str) -> Path:
    """Return where the timings of this machine are kept; another processor, thread count or PyTorch has another one."""
    key = hashlib.sha256("\0".join([_FORMAT, device, *describe_machine(device).values()]).encode()).hexdigest()[:16]
    return cache_folder().parent / "tuning" / f"{device}-{key}.json"


@cache
def _processor() -> str:
    """The processor's marketing name on Linux, its architecture elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()
