"""Check and time the GPU kernels on the machine at hand: `python -m vllm_teach.validation.gpu`. See `script`."""

from vllm_teach.validation.gpu.result import load_result
from vllm_teach.validation.gpu.script import main

__all__ = ["load_result", "main"]
