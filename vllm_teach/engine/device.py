"""Which device, which dtype, how much memory for the KV cache: the choices behind "auto"."""

from __future__ import annotations

import platform

import psutil
import torch

from vllm_teach.engine.failure import shown
from vllm_teach.errors import InvalidArgumentError

# A laptop's memory is shared with everything else that runs on it, so the cache takes a modest part of what is free.
CPU_MEMORY_SHARE = 0.25
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device; "auto" is CUDA where there is one, else the CPU. InvalidArgumentError if it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device={shown(device)} is not valid: use 'auto', 'cpu' or 'cuda'.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device={shown(device)} is not supported: use 'auto', 'cpu' or 'cuda'.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"device={shown(device)} is not usable, PyTorch finds no CUDA device: use 'cpu'.")
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype; "auto" is bfloat16 where the device multiplies bfloat16 matrices natively, else float32."""
    if dtype == "auto":
        native = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else cpu_multiplies_bf16()
        return torch.bfloat16 if native else torch.float32
    chosen = _DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None:
        raise InvalidArgumentError(f"dtype={shown(dtype)} is not valid: use 'auto' or one of {', '.join(_DTYPES)}.")
    return chosen


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions that PyTorch uses (AMX, AVX-512 BF16; Arm's BF16).

    Without them PyTorch converts back and forth and bfloat16 is slower than float32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return _arm_has_bf16()
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _arm_has_bf16() -> bool:
    # On x86 this operator also answers True where bfloat16 is emulated with AVX-512.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kv_cache_budget(device: torch.device, gpu_memory_utilization: float) -> int:
    """Return the bytes for the KV cache: a share of what is free once the model is loaded.

    On CUDA the share is `gpu_memory_utilization`; on a CPU it is `CPU_MEMORY_SHARE` of the available host memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * gpu_memory_utilization)
    return int(psutil.virtual_memory().available * CPU_MEMORY_SHARE)
