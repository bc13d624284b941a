"""What an A100 would take, by its data sheet: a roofline of counted FLOPs and bytes. Modelled, and always labelled so.

The roofline is the least that a program could take: nothing attains the whole peak or bandwidth. Ratios of two such
times are idealised as well, and bound the real ratio on neither side; that is why they confirm only within a factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_teach.performance.hardware import HardwareSpec, get_hardware
from vllm_teach.performance.roofline import attainable

if TYPE_CHECKING:
    from vllm_teach.counters import Work

CARDS = ("a100-40gb-sxm", "a100-80gb-sxm")
"""The articles say "A100" and not which."""
HEADS, HEAD_DIM, LENGTH = 16, 128, 2048
"""The articles' layer, hidden size 2,048 at 2,048 tokens; its heads are not published, 16 of 128 are the usual cut."""
BATCH = 8
"""Not published; by the difference of the two memory rows, 3,200 and 1,100 MB (see `B-flash-attention`, memory_mb)."""
PARAMETERS_70B = 68_976_648_192
"""Of Llama-2-70B, counted from its published configuration."""


def card(name: str = CARDS[0]) -> HardwareSpec:
    """Return an A100 by its data sheet."""
    return get_hardware(name)


def layer_sizes(length: int = LENGTH, batch: int = BATCH, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Return the sizes of the articles' layer in half precision, as `attention.traffic` takes them."""
    heads = HEADS * HEAD_DIM // head_dim
    return {
        "batch": batch, "q_len": length, "kv_len": length, "q_heads": heads, "kv_heads": heads, "head_dim": head_dim,
        "input_bytes": 2,
    }  # fmt: skip


def tiled_sizes() -> dict[str, Any]:
    """Return the tile of FlashAttention 2 for head_dim 128 on an A100, and the fast memory of one of its programs."""
    return {"tile_q": 128, "tile_k": 64, "fast_memory_bytes": 163 * 1024}


def seconds(work: Work, hardware: HardwareSpec) -> float:
    """Return the least seconds that `work` takes in one kernel: arithmetic or memory, whichever is slower."""
    if work.flops == 0:
        return work.bytes_moved / hardware.memory_bandwidth
    return work.flops / attainable(work.intensity, hardware.peak_of("float16"), hardware.memory_bandwidth)


def seconds_by_step(steps: dict[str, Work], hardware: HardwareSpec) -> float:
    """Return the least seconds of steps that run one after the other, each a kernel of its own."""
    return sum(seconds(step, hardware) for step in steps.values())
