"""What this process runs on: versions, device, threads; which attention backends and CPU kernels it can use."""

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from vllm_teach import __version__, backends
from vllm_teach.kernels import cpu_build, cpu_library

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy",
    "triton", "xformers", "flash-attn", "jupyterlab", "ipywidgets", "fastapi", "ray",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """A snapshot that `vllm-teach info` prints and result files carry as their provenance.

    `backends` and `cpu_kernels` say of each why it is not usable, None where it is.
    """

    vllm_teach: str
    python: str
    platform: str
    device: str
    cpu_capability: str
    cores: int
    torch_threads: int
    packages: dict[str, str | None]
    backends: dict[str, str | None]
    cpu_kernels: dict[str, str | None]


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, or None when it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_environment() -> Environment:
    """Collect the snapshot; loads torch, and no optional library but those that a backend's probe imports."""
    return Environment(
        vllm_teach=__version__,
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})",
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        packages={name: installed_version(name) for name in PACKAGES},
        backends=backends.availability(),
        cpu_kernels={name: cpu_library.unavailable(name) for name in cpu_build.LIBRARIES},
    )


def format_environment(environment: Environment) -> str:
    """Return the snapshot as the text of `vllm-teach info`."""
    lines = [
        f"vllm-teach {environment.vllm_teach}, Python {environment.python}, {environment.platform}",
        f"device: {environment.device}, {environment.cpu_capability}, "
        f"{environment.cores} cores, {environment.torch_threads} torch threads",
        "",
        "packages",
        *(f"  {name:<18}{version or 'not installed'}" for name, version in environment.packages.items()),
        "",
        "attention backends",
        *_uses(environment.backends),
        "",
        "CPU kernels",
        *_uses(environment.cpu_kernels),
    ]
    return "\n".join(lines)


def _uses(reasons: dict[str, str | None]) -> list[str]:
    return [f"  {name:<18}{f'no: {reason}' if reason else 'usable'}" for name, reason in reasons.items()]
