"""What a result is measured on: the GPU with its clocks, the driver, the versions, the commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch

from vllm_teach import resources

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "flash-attn", "xformers")
# Names of `nvidia-smi --query-gpu`, and what they are called here; clocks in MHz, power in W, temperature in °C.
_QUERIES = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def describe(device: str) -> dict[str, Any]:
    """Return the machine as plain values, ready for JSON; `device` is "cuda" or "cpu". Changes no setting of it."""
    described: dict[str, Any] = {
        "device": f"cpu ({platform.machine()})",
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "driver": None,
        "gpus": 0,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": properties.name,
            "gpus": torch.cuda.device_count(),
            "capability": list(torch.cuda.get_device_capability(0)),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cudnn": torch.backends.cudnn.version(),
            **_smi(),
        }
    return described


def commit() -> str | None:
    """Return the checkout's commit, with "+changes" where files differ from it; None without git or a checkout."""
    root = resources.checkout_root()
    head = _output("git", "-C", str(root), "rev-parse", "HEAD") if root else None
    if not head:
        return None
    return head + ("+changes" if _output("git", "-C", str(root), "status", "--porcelain") else "")


def _smi() -> dict[str, Any]:
    """Ask nvidia-smi for the first GPU; empty where there is none. What it does not know is None."""
    answer = _output("nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader,nounits", "--id=0")
    if not answer:
        return {}
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    found: dict[str, Any] = dict(zip(_QUERIES.values(), values, strict=True))
    return {name: value if name == "driver" else _number(value) for name, value in found.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return run.stdout.strip() if run.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
