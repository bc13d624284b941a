"""How fast is the FlashAttention kernel, forward and backward, beside PyTorch's and other projects'?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vllm_teach.validation.gpu.checks import agreeing
from vllm_teach.validation.gpu.clock import measure
from vllm_teach.validation.gpu.result import Record
from vllm_teach.validation.gpu.rivals import OURS, Attention, naive, rivals
from vllm_teach.validation.gpu.sections import Item
from vllm_teach.validation.gpu.setting import Setting

_HIDDEN = 2048  # heads * head_dim, the articles' width
_TOKENS = 16_384  # of a batch, whatever its length: FlashAttention's own benchmark does the same
_LARGEST_NAIVE = 4096  # beyond it the plain formula's n² scores fill a GPU


def attention_items(setting: Setting) -> list[Item]:
    """Return one item per shape, the middle lengths first: each times every implementation in turn."""
    lengths = setting.pick((4096, 2048, 8192, 512, 1024, 16_384), (1024, 4096), (40,))
    items = []
    for length in lengths:
        for head_dim in setting.pick((128, 64), (128,), (16,)):
            for backward in (False, True):
                name = f"n={length}, head_dim {head_dim}, causal, {'forward + backward' if backward else 'forward'}"
                items.append(Item(name, partial(time_shape, setting, name, length, head_dim, backward)))
    return items


def time_shape(setting: Setting, name: str, length: int, head_dim: int, backward: bool) -> list[Record]:
    """Time every implementation on one shape and compare their outputs with ours."""
    heads = setting.pick(_HIDDEN, _HIDDEN, 32) // head_dim
    batch = max(1, setting.pick(_TOKENS, _TOKENS, length) // length)
    q, k, v = (x.requires_grad_(backward) for x in setting.qkv(batch, length, heads, head_dim))
    forward_flops = flops(batch, heads, length, head_dim, causal=True)
    shape = {
        "n": length, "batch": batch, "heads": heads, "head_dim": head_dim, "causal": True,
        "direction": "forward + backward" if backward else "forward", "dtype": str(setting.dtype),
    }  # fmt: skip
    # The backward pass has five matrix products of that size, the forward pass two.
    work = forward_flops * 3.5 if backward else forward_flops
    attend = rivals(setting.device) | ({"naive": naive} if length <= _LARGEST_NAIVE else {})
    records: list[Record] = []
    ours = attend[OURS](q, k, v, True).detach()
    for rival, attention in attend.items():
        call: Callable[[], object] = partial(attention, q, k, v, True)
        if backward:
            call = training_step(attention, q, k, v)
        record = timed(setting, rival, name, call, own=rival == OURS)
        if record["kind"] == "time":
            record |= shape | {"tflops": round(work / record["median_ms"] / 1e9, 3)}
            if rival != OURS and not backward:
                records.append(agreeing(f"{name}: {rival} agrees", ours, attention(q, k, v, True)))
        records.append(record)
    return records


def training_step(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    """Return a call that runs the forward and the backward pass, under a causal mask."""
    upstream = torch.ones_like(q)

    def step() -> object:
        return torch.autograd.grad(attention(q, k, v, True), (q, k, v), upstream)

    return step


def timed(setting: Setting, implementation: str, name: str, call: Callable[[], object], own: bool) -> Record:
    """Time one call. One of another project that cannot run here gives a record that says why; ours raises."""
    try:
        figures = measure(call, setting.device, setting.repeats)
    except (RuntimeError, ImportError, ValueError, NotImplementedError) as error:
        if own:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"kind": "skipped", "name": name, "implementation": implementation, "reason": reason}
    return {"kind": "time", "name": name, "implementation": implementation, **figures}


def flops(batch: int, heads: int, length: int, head_dim: int, causal: bool) -> float:
    """FLOPs of the two matrix products of a forward pass, two per multiply-add; half of them under a causal mask."""
    return 4.0 * batch * heads * length * length * head_dim * (0.5 if causal else 1.0)
