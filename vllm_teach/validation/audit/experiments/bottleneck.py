"""Why attention needs optimising: its share of time and memory, the batch that fits, its peak (B-bottleneck)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import Check, at_least, at_most, near, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.attention_speed import tiled_backend
from vllm_teach.validation.audit.finding import MODELLED, Finding, arithmetic, counted, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.performance.shares import LayerShape, Share

_B = published("B-bottleneck")
_REAL_TIME = (0.15, 1.0)
"""Seconds to the first token that may be meant: article B's own best P99, and what is felt as an answer at once."""


def _shapes() -> dict[str, LayerShape]:
    """The layers that are measured: a small model's, and one of the articles' width in Llama's proportions."""
    from vllm_teach.performance.shares import SMOLLM2_135M, LayerShape

    return {"hidden 576": SMOLLM2_135M, "hidden 2,048": LayerShape(2048, 5504, 16, 16, 128)}


def measure_shares(lab: Lab) -> dict[str, Share]:
    """Measure attention's share of a decoder layer with plain attention over 2,048 tokens, by shape."""
    import torch

    from vllm_teach.performance.shares import measure_share

    dtype = torch.float16 if lab.on_gpu else torch.float32
    repeats = lab.pick(7, 5)
    return {
        name: measure_share(a100.LENGTH, shape, repeats=repeats, dtype=dtype, device=lab.device)
        for name, shape in _shapes().items()
    }


def trace_shares(lab: Lab) -> dict[str, Share]:
    """Trace the same layers on the processor, whose allocations can be told apart; a GPU's cannot."""
    from vllm_teach.performance.shares import measure_share

    return {name: measure_share(a100.LENGTH, shape, repeats=1) for name, shape in _shapes().items()}


def _layer_seconds(length: int, name: str) -> tuple[float, float]:
    """Return (attention, linear layers) of the articles' layer on an A100, seconds; one sequence, float16."""
    from vllm_teach.attention.traffic import naive_traffic

    hardware = a100.card(name)
    naive = naive_traffic(**a100.layer_sizes(length, 1))
    linear = 2 * _shapes()["hidden 2,048"].linear_parameters * length / hardware.peak_of("float16")
    return a100.seconds_by_step(naive.by_name, hardware), linear


@experiment(
    "B-bottleneck",
    "attention_time_share",
    at_least(
        "above 60 % for some model", "hidden 576 at 2,048 tokens", _B("attention_time_share", "above"),
        "the claim names no model: one for which it holds confirms this part",
    ),
    at_least(
        "above 60 % for a model of the article's width", "A100, hidden 2,048", _B("attention_time_share", "above"),
        "the claim's own device and width",
    ),
)  # fmt: skip
def time_share(lab: Lab) -> Iterator[Finding]:
    """Measure plain attention's share of a layer's time for two widths, and model the articles' layer on an A100."""
    yield from _time_shares(lab)


@experiment(
    "B-bottleneck",
    "attention_time_share@2048",
    near(
        "68 % for a small model", "hidden 576 at 2,048 tokens", _B("attention_time_share@2048", "value"), 1.25,
        "a factor of 1.25, which for a share of 0.68 is 0.54 to 0.85", None,
    ),
    near(
        "68 % for a model of the article's width", "hidden 2,048 at 2,048 tokens",
        _B("attention_time_share@2048", "value"), 1.25, "the same", None,
    ),
)  # fmt: skip
def time_share_at_2048(lab: Lab) -> Iterator[Finding]:
    """Measure the share at 2,048 tokens, and compute how many more walks through the scores would make it 68 %."""
    yield from _time_shares(lab)
    share = _B("attention_time_share@2048", "value")
    for name in a100.CARDS:
        attention, linear = _layer_seconds(a100.LENGTH, name)
        walk = 2 * a100.HEADS * a100.LENGTH**2 * 2 / a100.card(name).memory_bandwidth
        more = (linear * share / (1 - share) - attention) / walk
        yield modelled(
            f"more walks through the scores for 68 %, {a100.card(name).title}", more, "",
            "separate passes for scale, mask, float32 softmax, casts and dropout would be some",
        )  # fmt: skip


def _time_shares(lab: Lab) -> Iterator[Finding]:
    for name, share in lab.once(measure_shares).items():
        timing = Timing.of(list(share.time_shares))
        yield measured(f"{name} at 2,048 tokens", timing, "of the time", _setting(lab, name))
    for name in a100.CARDS:
        attention, linear = _layer_seconds(a100.LENGTH, name)
        title = "A100, hidden 2,048" if name == a100.CARDS[0] else f"{a100.card(name).title}, hidden 2,048"
        yield modelled(title, attention / (attention + linear), "of the time", "float16, roofline, one sequence")


@experiment(
    "B-bottleneck",
    "attention_intermediates_memory_share@2048",
    *(
        at_least(
            f"above 75 %, {name}", f"{name}, of the intermediates",
            _B("attention_intermediates_memory_share@2048", "above"), "an exact count, so no tolerance",
        )
        for name in ("hidden 576", "hidden 2,048")
    ),
)  # fmt: skip
def memory_share(lab: Lab) -> Iterator[Finding]:
    """Trace every allocation of a layer with plain attention, and count attention's at the moment of the peak."""
    for name, share in lab.once(trace_shares if lab.on_gpu else measure_shares).items():
        yield counted(f"{name}, of the intermediates", share.memory_share, "", f"one layer, {name}; without weights")


@experiment(
    "B-bottleneck",
    "max_batch@2048",
    *(
        at_most(
            f"at most 4 sequences where {what}", f"A100 {size}, {what}", _B("max_batch@2048", "at_most"),
            "sizes alone, so no tolerance; weights of 7 billion parameters in float16",
        )
        for size, what in itertools.product(("40GB", "80GB"), ("one layer's scores are held", "all 32 layers' are"))
    ),
)  # fmt: skip
def max_batch(lab: Lab) -> Iterator[Finding]:
    """Compute how many sequences of Llama-2-7B fit beside its weights, if one or all layers keep their scores."""
    weights, pair = 13.5e9, 2 * 32 * 2048 * 2048 * 2  # S and P of 32 heads, 2 bytes a number
    for size, number_of_bytes in (("40GB", 40e9), ("80GB", 80e9)):
        for layers, what in ((1, "one layer's scores are held"), (32, "all 32 layers' are")):
            fits = (number_of_bytes - weights) // (layers * pair)
            yield arithmetic(f"A100 {size}, {what}", fits, "sequences", f"{layers * pair / 1e9:.1f} GB a sequence")


@experiment(
    "B-bottleneck",
    "peak_flops_utilisation",
    *(
        at_most(
            f"below 30 %, head_dim {head_dim}, {size}", f"A100 {size}, head_dim {head_dim}",
            _B("peak_flops_utilisation", "below") + 0.005,
            "a roofline is the most that can be reached; rounded to the two digits of the claim",
        )
        for size, head_dim in itertools.product(("40GB", "80GB"), (64, 128))
    ),
)  # fmt: skip
def utilisation(lab: Lab) -> Iterator[Finding]:
    """Put plain attention under an A100's roofline for two head sizes, and under this machine's by the clock."""
    from vllm_teach.attention.traffic import naive_traffic

    for name, size in zip(a100.CARDS, ("40GB", "80GB"), strict=True):
        hardware = a100.card(name)
        for head_dim in (64, 128):
            work = naive_traffic(**a100.layer_sizes(head_dim=head_dim))
            reached = work.flops / a100.seconds_by_step(work.by_name, hardware) / hardware.peak_of("float16")
            yield modelled(f"A100 {size}, head_dim {head_dim}", reached, "of the peak", "2,048 tokens, at the most")


@experiment(
    "B-bottleneck",
    "beyond_1024_tokens_the_standard_implementation",
    Check(
        "beyond some 1,024 tokens it misses real time", "longest prompt, plain attention, A100", 512, 2048,
        "a factor of 2 around 1,024, for the model is not published; nor is the limit: any from the article's own P99 "
        "of 150 ms to 1 s",
        by_spread=True,
    ),
    at_least(
        "the implementation is why, on an A100", "longest prompt, tiled / plain, A100", 1.25,
        "a quarter more tokens in the same time: with less, another attention would not meet the need either", 1.0,
    ),
    at_least(
        "the implementation is why, here", "time of a prompt of 1,024 tokens, plain / tiled", 1.25, "the same", 1.0,
    ),
)  # fmt: skip
def real_time(lab: Lab) -> Iterator[Finding]:
    """Find the longest prompt that meets a limit under plain and tiled attention on an A100; time both layers here."""
    longest = {name: [_longest_prompt(name, limit) for limit in _REAL_TIME] for name in ("plain", "tiled")}
    for name, (least, most) in longest.items():
        yield Finding(
            f"longest prompt, {name} attention, A100", most, "tokens", MODELLED,
            f"Llama-2-7B, float16, 80GB, half of its peak attained; first token within {_REAL_TIME[0]:g} to "
            f"{_REAL_TIME[1]:g} s",
            least, most, 2,
        )  # fmt: skip
    ratio = longest["tiled"][1] / longest["plain"][1]
    yield modelled("longest prompt, tiled / plain, A100", ratio, "x", f"the same, within {_REAL_TIME[1]:g} s")
    yield measured(
        "time of a prompt of 1,024 tokens, plain / tiled", _race_prompt(lab), "x",
        f"one layer as SmolLM2's, backends naive and {tiled_backend(lab.device)!r}, {lab.label}",
    )  # fmt: skip


def _longest_prompt(name: str, limit: float) -> int:
    """Return the longest prompt, in steps of 128 tokens, that Llama-2-7B reads on an A100 80GB within `limit` s."""
    length = 128
    while _prefill_7b(name, length + 128) <= limit:
        length += 128
    return length


def _prefill_7b(name: str, length: int) -> float:
    """Modelled seconds of a prompt; half of the roofline is attained."""
    from vllm_teach.attention.traffic import naive_traffic, tiled_traffic

    hardware = a100.card(a100.CARDS[1])
    sizes = {**a100.layer_sizes(length, 1), "q_heads": 32, "kv_heads": 32}
    if name == "plain":
        attention = a100.seconds_by_step(naive_traffic(**sizes).by_name, hardware)
    else:
        attention = a100.seconds(tiled_traffic(**sizes, **a100.tiled_sizes(), causal=True), hardware)
    return 2 * (32 * attention + 2 * 6.6e9 * length / hardware.peak_of("float16"))


def _race_prompt(lab: Lab) -> Timing:
    """Return the time of a layer over 1,024 tokens with plain attention over that with tiled, round by round."""
    from vllm_teach.performance.shares import SMOLLM2_135M, measure_share

    ratios = []
    for _ in range(lab.pick(11, 5)):
        plain, tiled = (
            measure_share(1024, SMOLLM2_135M, backend=name, repeats=1, device=lab.device).total_seconds
            for name in ("naive", tiled_backend(lab.device))
        )
        ratios.append(plain / tiled)
    return Timing.of(ratios)


def _setting(lab: Lab, name: str) -> str:
    return f"one decoder layer, {name}, plain attention, {'float16' if lab.on_gpu else 'float32'}, {lab.label}"
