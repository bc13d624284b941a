"""Advice on FlashAttention: tiles, precision, the causal mask, and how it is called (B-flash-advice)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

from vllm_teach.performance.hardware import get_hardware
from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.check import at_least, at_most
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, documented, measured
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.tables import get_table

_TABLE = "B-flash-advice"
_REGISTERS = 256 * 1024  # bytes of a multiprocessor, on an A100 and on an H100
_RESERVED = 1024  # bytes of shared memory that the system takes of each program
_CARDS = {"a100": "a100-80gb-sxm", "h100": "h100-80gb-sxm"}
_SIDES = (64, 128, 256, 512)


@experiment(
    _TABLE,
    "tile_size_depends_on_the_gpu_128_x_128_on_a100",
    *(
        at_most(
            f"its tile fits an {gpu.upper()}", f"{gpu.upper()}: registers for scores and output / all there are", 1.0,
            "what does not fit is spilled to memory, which is what tiling avoids; head_dim 128",
        )
        for gpu in _CARDS
    ),
)  # fmt: skip
def tiles(lab: Lab) -> Iterator[Finding]:
    """Compute what the published tiles need of registers and shared memory, and time tiles of four sizes here."""
    for gpu, name in _CARDS.items():
        tile_q, tile_k = get_table("B-flash-attention").tiles[gpu]
        floats = tile_q * (tile_k + 128) * 4  # scores and output, float32
        inputs = (tile_q + 2 * tile_k) * 128 * 2  # Q, K and V, float16
        setting = f"{tile_q} x {tile_k}, head_dim 128: {floats // 1024} of {_REGISTERS // 1024} KiB"
        yield arithmetic(
            f"{gpu.upper()}: registers for scores and output / all there are", floats / _REGISTERS, "", setting
        )
        shared = get_hardware(name).shared_memory_bytes - _RESERVED
        yield arithmetic(f"{gpu.upper()}: shared memory for Q, K and V / all there is", inputs / shared, "", setting)
    ratios = _race_tiles(lab)
    for side, ratio in ratios.items():
        yield measured(f"time here, {side} x {side} / 128 x 128", ratio, "x", "our Python loop, on the processor")


def _race_tiles(lab: Lab) -> dict[int, Timing]:
    import torch

    from vllm_teach.attention import flash_attention
    from vllm_teach.performance.side_by_side import race

    qkv = [torch.randn(1, lab.pick(2048, 1024), 2, 64) for _ in range(3)]
    run = partial(flash_attention, *qkv, causal=True)
    found = race({str(side): partial(run, tile_q=side, tile_k=side) for side in _SIDES}, "128", rounds=lab.pick(7, 5))
    return {side: found.ratios[str(side)] for side in _SIDES if side != 128}


@experiment(
    _TABLE,
    "fp16_is_fastest_some_cases_need_fp32_for",
    at_least("fp16 is faster than fp32", "A100, float16 / float32", 1.05, "5 %", 1.0),
    at_least("fp16 is faster than bf16", "A100, float16 / bfloat16", 1.05, "5 %: the claim is of the fastest", 1.0),
    at_least(
        "some cases need fp32", "error, running softmax in float16 / float16 inputs alone", 2.0,
        "twice the error that inputs in float16 make anyway", 1.0,
    ),
)  # fmt: skip
def precision(lab: Lab) -> Iterator[Finding]:
    """Compare the peaks of an A100 by dtype, and what a running softmax in 16 bits adds to the error of its inputs."""
    import torch

    from vllm_teach.attention.online_softmax import SoftmaxState, finish, update

    hardware = get_hardware(_CARDS["a100"])
    half = hardware.peak_of("float16")
    for other in ("float32", "bfloat16"):
        yield documented(f"A100, float16 / {other}", half / hardware.peak_of(other), "x", hardware.source)
    source = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 4096, generator=source, dtype=torch.float64)
    values = torch.randn(4096, 32, generator=source, dtype=torch.float64)
    exact = scores.softmax(-1) @ values
    half_inputs = scores.half(), values.half()
    errors = {}
    for dtype in (torch.float16, torch.float32):
        state = SoftmaxState.empty((64,), 32, dtype=dtype)
        for start in range(0, 4096, 64):
            tile = slice(start, start + 64)
            state = update(state, half_inputs[0][:, tile], half_inputs[1][tile])  # computed in the state's dtype
        errors[dtype] = float((finish(state)[0].double() - exact).abs().max())
    ratio = errors[torch.float16] / errors[torch.float32]
    setting = "64 rows of 4,096 keys in tiles of 64"
    yield counted("error, running softmax in float16 / float16 inputs alone", ratio, "x", setting)


@experiment(
    _TABLE,
    "the_causal_mask_needs_an_implementation_of_its",
    at_least(
        "in prefill, skipping what the mask hides pays", "tile pairs without skipping / with", 1.05, "5 %", 1.0
    ),
    at_least(
        "in generation there is something to mask", "keys hidden from the query of a decode step", 1.0,
        "one hidden key would be enough to need a mask",
    ),
    at_least(
        "it takes an implementation of its own", "largest difference from the masked formula, one loop for all", 1e-3,
        "a loop without the mask's own implementation would be wrong by more than rounding",
    ),
)  # fmt: skip
def causal_mask(lab: Lab) -> Iterator[Finding]:
    """Count visited tiles and hidden keys, and run the one loop that serves every pattern under a causal mask."""
    import torch

    from vllm_teach.attention import flash_attention, naive_attention, tiled_traffic
    from vllm_teach.attention.patterns import Causal

    sizes: dict[str, Any] = {
        "batch": 1,
        "q_len": 2048,
        "kv_len": 2048,
        "q_heads": 1,
        "kv_heads": 1,
        "head_dim": 128,
        "input_bytes": 2,
    }
    flops = [tiled_traffic(**sizes, causal=causal).flops for causal in (False, True)]
    yield counted("tile pairs without skipping / with", flops[0] / flops[1], "x", "2,048 tokens, tiles of 128 x 128")
    visible = int(Causal().mask(1, 2048).sum())
    yield counted("keys hidden from the query of a decode step", 2048 - visible, "keys", "one query, 2,048 keys")
    q, k, v = (torch.randn(1, 300, 2, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    wrong = float((flash_attention(q, k, v, pattern=Causal()) - naive_attention(q, k, v, causal=True)).abs().max())
    yield counted(
        "largest difference from the masked formula, one loop for all", wrong, "", "the loop that runs every pattern"
    )


@experiment(
    _TABLE,
    "flashattention_head_size_128_scale_1_sqrt_128",
    at_most(
        "such a layer computes attention", "largest difference from the formula", 1e-5, "float32's rounding"
    ),
    at_least(
        "the package flash-attn has it", "flash-attn's names for such a class", 1.0, "one would be enough"
    ),
)  # fmt: skip
def call(lab: Lab) -> Iterator[Finding]:
    """Call our layer of that signature and compare it with the formula; look for it in the package flash-attn."""
    import torch

    from vllm_teach.attention import FlashAttention, naive_attention

    q, k, v = (torch.randn(1, 256, 16, 128, generator=torch.Generator().manual_seed(i)) for i in range(3))
    out = FlashAttention(head_size=128, scale=128**-0.5, num_heads=16)(q, k, v)
    error = float((out - naive_attention(q, k, v)).abs().max())
    yield counted("largest difference from the formula", error, "", "vllm_teach.attention.FlashAttention, 16 heads")
    if importlib.util.find_spec("flash_attn") is not None:
        import flash_attn

        yield counted(
            "flash-attn's names for such a class", float(hasattr(flash_attn, "FlashAttention")), "", "installed"
        )
    else:
        yield documented(
            "flash-attn's names for such a class", 0, "",
            "flash_attn 2.8, flash_attn_interface.py: functions alone, which read heads and sizes from the shapes",
        )  # fmt: skip
