"""The articles' rule: an order of backends, from sequence length, hardware and batch size.

Above a threshold (1,024 tokens in the articles) the score matrix is what costs, and kernels that never hold it come
first; below it the call is short, and what starts fastest comes first: PyTorch's own. No real system chooses per call
like this; see the policy "measured" for a rule fed by this machine's own timings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vllm_teach.backends.bands import band_of
from vllm_teach.backends.hardware import CPU_ISA_NAMES, Hardware
from vllm_teach.backends.spec import AttentionSpec

# What they do with a layout: these have kernels for many sequences, the others go through them one by one.
HAVE_LAYOUTS = frozenset({"cpu", "triton", "flash_attn", "xformers"})
# These compute pairs that a pattern hides, and mask them.
COMPUTE_HIDDEN = frozenset({"naive", "sdpa"})

_PLAIN = ("memory_efficient", "tiled", "naive")


class Preference(NamedTuple):
    """Backends from the first choice to the last, why in this order, and why some of them stand further back."""

    order: tuple[str, ...]
    reason: str
    behind: dict[str, str]


def prefer(spec: AttentionSpec, threshold: int, hardware: Hardware) -> Preference:
    """Return the order in which the articles' rule tries backends for such a call on such a machine."""
    long, length_reason = _is_long(spec, threshold)
    order, hardware_reason = _by_hardware(spec, long, hardware)
    behind: dict[str, str] = {}
    if long and _hides_many(spec):
        behind |= {name: f"{name} computes the pairs that the pattern hides, too." for name in COMPUTE_HIDDEN}
    if spec.layout != "dense":
        loops = "it gathers the blocks of each sequence" if spec.layout == "paged" else "it loops over the sequences"
        behind |= {name: f"{name} has no {spec.layout} kernel: {loops}." for name in order if name not in HAVE_LAYOUTS}
    ordered = tuple(sorted(order, key=lambda name: name in behind))  # stable: the order within each part stays
    reason = f"{length_reason}, {hardware_reason}"
    if order[0] in behind and ordered[0] != order[0]:
        reason += f", but {behind[order[0]].removesuffix('.')}"
    return Preference(ordered, reason, behind)


def _is_long(spec: AttentionSpec, threshold: int) -> tuple[bool, str]:
    """Return whether the call is long, and why: by its longest sequence, or by how many scores the batch has."""
    length = max(spec.q_len, spec.kv_len)
    if length >= threshold:
        return True, f"{length:,} tokens reach the threshold of {threshold:,}"
    scores = spec.batch * spec.q_len * spec.kv_len
    if scores >= threshold**2:
        side = math.isqrt(scores)
        return True, f"a batch of {spec.batch} has as many scores as one sequence of {side:,} tokens"
    return False, f"{length:,} tokens stay below the threshold of {threshold:,}"


def _by_hardware(spec: AttentionSpec, long: bool, hardware: Hardware) -> tuple[tuple[str, ...], str]:
    if spec.device == "cuda":
        halves = spec.dtype in (torch.float16, torch.bfloat16)
        if not long:
            return ("sdpa", "flash_attn", "xformers", "triton", "flex", *_PLAIN), "PyTorch's kernel starts fastest"
        if halves and hardware.has_tensor_cores:
            return (
                ("flash_attn", "sdpa", "xformers", "triton", "flex", *_PLAIN),
                "16-bit numbers go to the GPU's tensor cores",
            )
        return (
            ("xformers", "sdpa", "flex", "triton", *_PLAIN),
            f"{str(spec.dtype).removeprefix('torch.')} does not go to tensor cores",
        )
    if not long:
        return ("sdpa", "cpu", "flex", *_PLAIN), "PyTorch's kernel starts fastest"
    if "amx" in hardware.cpu_isa and spec.dtype == torch.bfloat16:
        return ("sdpa", "cpu", "flex", *_PLAIN), "PyTorch multiplies bfloat16 with AMX"
    if isa := next((isa for isa in ("avx512", "avx2") if isa in hardware.cpu_isa), None):
        return ("cpu", "sdpa", "flex", *_PLAIN), f"our kernel uses {CPU_ISA_NAMES[isa]}"
    return ("sdpa", "cpu", "flex", *_PLAIN), "without AVX2 our kernel is no faster than PyTorch's"


def _hides_many(spec: AttentionSpec) -> bool:
    """Whether the pattern hides more than the causal half, as far as can be told without looking at pairs."""
    band = band_of(spec.pattern, spec.q_len, spec.kv_len)
    return band is None or band[0] != -1
