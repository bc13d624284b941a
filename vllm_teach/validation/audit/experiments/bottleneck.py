"""Why attention needs optimising: its share of time and memory, the batch that fits, its peak (B-bottleneck)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import at_least, at_most, between, near, published
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.attention_speed import attention_inputs, tiled_backend
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.performance.shares import LayerShape, Share

_B = published("B-bottleneck")
_REAL_TIME = {0.15: "the article's own best P99", 1.0: "what is felt as an answer at once"}
"""Seconds to the first token that may be meant."""
_ATTAINED = 0.8
"""Of an A100's bandwidth by what goes element by element: an assumption of the cost model, with its sources there."""


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


def _layer_seconds(length: int, name: str, width: str = "hidden 2,048") -> tuple[float, float]:
    """Return (attention, linear layers) of a layer of `_shapes` on an A100, seconds; one sequence, float16."""
    from vllm_teach.attention.traffic import naive_traffic

    hardware, shape = a100.card(name), _shapes()[width]
    sizes = {"q_heads": shape.num_q_heads, "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    naive = naive_traffic(batch=1, q_len=length, kv_len=length, **sizes, input_bytes=2)
    linear = 2 * shape.linear_parameters * length / hardware.peak_of("float16")
    return a100.seconds_by_step(naive.by_name, hardware), linear


@experiment(
    "B-bottleneck",
    "attention_time_share",
    at_least(
        "above 60 % for some model, on this device", "hidden 576 at 2,048 tokens", _B("attention_time_share", "above"),
        "the claim names no model: one for which it holds confirms this part",
    ),
    at_least(
        "above 60 % for some model, on the claimed one", "A100, hidden 576", _B("attention_time_share", "above"),
        "the same",
    ),
    at_least(
        "above 60 % for a model of the article's width", "A100, hidden 2,048", _B("attention_time_share", "above"),
        "the claim's own device and width",
    ),
)  # fmt: skip
def time_share(lab: Lab) -> Iterator[Finding]:
    """Measure plain attention's share of a layer's time for two widths, and model both layers on an A100."""
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
    for name, width in itertools.product(a100.CARDS, _shapes()):
        attention, linear = _layer_seconds(a100.LENGTH, name, width)
        title = f"A100, {width}" if name == a100.CARDS[0] else f"{a100.card(name).title}, {width}"
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
            f"at most 4 sequences in {size} where {what}", f"A100 {size}, {what}", _B("max_batch@2048", "at_most"),
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
            _B("peak_flops_utilisation", "below"),
            "the claim's own bound; memory limits plain attention, of whose bandwidth 80 % are assumed to be attained",
        )
        for size, head_dim in itertools.product(("40GB", "80GB"), (64, 128))
    ),
)  # fmt: skip
def utilisation(lab: Lab) -> Iterator[Finding]:
    """Model plain attention on two A100s for two head sizes, and race it here against a plain matrix product."""
    from vllm_teach.attention.traffic import naive_traffic

    for name, size in zip(a100.CARDS, ("40GB", "80GB"), strict=True):
        hardware = a100.card(name)
        for head_dim in (64, 128):
            work = naive_traffic(**a100.layer_sizes(head_dim=head_dim))
            most = work.flops / a100.seconds_by_step(work.by_name, hardware) / hardware.peak_of("float16")
            yield modelled(
                f"A100 {size}, head_dim {head_dim}", _ATTAINED * most, "of the peak",
                f"2,048 tokens; {most:.3f} by the roofline, which is the most that there could be",
            )  # fmt: skip
    yield measured(
        "this machine, head_dim 128", _race_product(lab), "of a product's rate",
        f"2,048 tokens, {lab.label}; a processor has less arithmetic for its bandwidth, and decides nothing here",
    )  # fmt: skip


def _race_product(lab: Lab) -> Timing:
    """Return the FLOP/s of plain attention over those of a matrix product as large as memory hardly matters for."""
    import torch

    from vllm_teach import backends
    from vllm_teach.performance.side_by_side import race

    qkv = attention_inputs(lab, a100.LENGTH)
    batch, length, heads, head_dim = qkv[0].shape
    side = 8192 if lab.on_gpu else 1024
    square = torch.ones(side, side, dtype=qkv[0].dtype, device=lab.device)
    calls = {"plain": partial(backends.get("naive").run, *qkv), "product": partial(torch.matmul, square, square)}
    with torch.inference_mode(), lab.one_thread():
        found = race(calls, "product", rounds=lab.pick(11, 5), device=lab.device)
    work = 4 * batch * heads * length**2 * head_dim / (2 * side**3)  # FLOPs, in products
    return Timing.of([work / ratio for ratio in found.ratios["plain"].samples])


@experiment(
    "B-bottleneck",
    "beyond_1024_tokens_the_standard_implementation",
    *(
        between(
            f"beyond some 1,024 tokens it takes more than {limit:g} s", f"longest prompt within {limit:g} s, plain",
            1024, 1024, f"a factor of 2, for the model is not published; nor is the limit: {what}", 2.0, None,
        )
        for limit, what in _REAL_TIME.items()
    ),
    *(
        at_least(
            f"and the implementation is why, within {limit:g} s", f"longest prompt within {limit:g} s, tiled / plain",
            1.25, "a quarter more tokens in the same time: with less, another attention would not meet the need either",
            1.0,
        )
        for limit in _REAL_TIME
    ),
    at_least(
        "the implementation is why, here", "time of a prompt of 1,024 tokens, plain / tiled", 1.25,
        "a quarter of the time, likewise", 1.0,
    ),
)  # fmt: skip
def real_time(lab: Lab) -> Iterator[Finding]:
    """Find the longest prompt that meets a limit under plain and tiled attention on an A100; time both layers here."""
    for limit in _REAL_TIME:
        plain, tiled = (_longest_prompt(name, limit) for name in ("plain", "tiled"))
        setting, name = "Llama-2-7B on an A100 80GB, float16, half of its peak attained", f"within {limit:g} s"
        yield modelled(f"longest prompt {name}, plain", plain, "tokens", setting)
        yield modelled(
            f"longest prompt {name}, tiled / plain", tiled / plain, "x", f"{setting}; {tiled:,} tokens tiled"
        )
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
    import torch

    from vllm_teach.models.attend import full_causal
    from vllm_teach.models.decoder import Decoder
    from vllm_teach.performance.model_shapes import get_model_shape
    from vllm_teach.performance.side_by_side import race

    dtype, tiled = torch.float16 if lab.on_gpu else torch.float32, tiled_backend(lab.device)
    model = Decoder(replace(get_model_shape("smollm2-135m"), num_layers=1)).init_random(dtype=dtype, device=lab.device)
    ids = torch.arange(1024, device=lab.device)
    calls = {name: partial(model, ids, ids, full_causal(name)) for name in ("naive", tiled)}
    with torch.inference_mode():
        return race(calls, tiled, rounds=lab.pick(11, 5), device=lab.device).ratios["naive"]


def _setting(lab: Lab, name: str) -> str:
    return f"one decoder layer, {name}, plain attention, {'float16' if lab.on_gpu else 'float32'}, {lab.label}"
