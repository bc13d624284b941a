"""The four modes of the xFormers table: time, memory, and what each does to a real model's text (B-xformers)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import LAYERS, Check, at_least, at_most, between, near, published, whole_model
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.attention_speed import attention_inputs, layers_here
from vllm_teach.validation.audit.experiments.pattern_reading import read_patterns
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    from vllm_teach.attention.patterns import Pattern
    from vllm_teach.performance.side_by_side import Race

_B = published("B-xformers")
_LAYERS = "layers on this A100"
_WHY = "a factor of 2, because batch, heads, mask and the sparse layout are not published"


def _faster(mode: str) -> tuple[Check, ...]:
    claimed = _B("original", "time_ms") / _B(mode, "time_ms")
    return (
        near(f"{claimed:.1f} times as fast as the original", "time, original / mode", claimed, 2.0, _WHY),
        near("and on an A100", "time on an A100, original / mode", claimed, 2.0, _WHY),
        whole_model(f"{_B(mode, 'time_ms'):.0f} ms are of a model's layers", _LAYERS),
    )


def _smaller(mode: str) -> Check:
    claimed = _B("original", "memory_mb") / _B(mode, "memory_mb")
    return near(f"{claimed:.1f} times less memory", "peak beyond q, k and v, original / mode", claimed, 2.0, _WHY)


@dataclass(frozen=True)
class ModeRace:
    """Seconds of every mode in the same rounds, the peak bytes of each, and what was run."""

    race: Race
    peaks: dict[str, int]
    setting: str


def mode_patterns() -> dict[str, Pattern]:
    """Return what each fast mode lets a query see; all are causal, as a language model needs it."""
    from vllm_teach.attention.patterns import BlockSparsePattern, Causal, LocalWindow

    return {
        "memory_efficient": Causal(),
        "sparse_50_percent": BlockSparsePattern.random(8, 256, density=0.5) & Causal(),
        "local_window_512": LocalWindow(511),
    }


def race_modes(lab: Lab) -> ModeRace:
    """Time the formula beside memory-efficient attention under each pattern, forward, 2,048 tokens."""
    import torch

    from vllm_teach import backends
    from vllm_teach.performance.memory import peak_memory
    from vllm_teach.performance.side_by_side import race

    qkv = attention_inputs(lab, a100.LENGTH)
    fast = "triton" if lab.on_gpu else "memory_efficient"
    calls: dict[str, Callable[[], object]] = {"original": partial(backends.get("naive").run, *qkv, causal=True)}
    for mode, pattern in mode_patterns().items():
        calls[mode] = partial(backends.get(fast).run, *qkv, pattern=pattern)
    with torch.inference_mode(), lab.one_thread():
        found = race(calls, "original", rounds=lab.pick(11, 5), warmup=1, device=lab.device)
        peaks = {mode: peak_memory(call, lab.device) for mode, call in calls.items()}
    size = f"batch {a100.BATCH}, 16 heads of 128, float16" if lab.on_gpu else "one head of 128, float32, one thread"
    return ModeRace(found, peaks, f"{size}, causal, forward; the modes are the backend {fast!r}")


def _speed_and_memory(lab: Lab, mode: str) -> Iterator[Finding]:
    from vllm_teach.attention.traffic import naive_traffic, tiled_traffic
    from vllm_teach.performance.timing import Timing

    modes = lab.once(race_modes)
    faster = Timing.of([1 / ratio for ratio in modes.race.ratios[mode].samples])
    yield measured("time, original / mode", faster, "x", modes.setting)
    if lab.is_a100:
        yield layers_here(_LAYERS, _B(mode, "time_ms"), modes.race.seconds[mode], modes.setting)
    less = modes.peaks["original"] / modes.peaks[mode]
    yield counted("peak beyond q, k and v, original / mode", less, "x", modes.setting)
    naive = naive_traffic(**a100.layer_sizes())
    tiled = tiled_traffic(**a100.layer_sizes(), **a100.tiled_sizes(), pattern=mode_patterns()[mode])
    ratio = a100.seconds_by_step(naive.by_name, a100.card()) / a100.seconds(tiled, a100.card())
    yield modelled("time on an A100, original / mode", ratio, "x", "float16, batch 8, roofline of its data sheet")


@experiment(
    "B-xformers",
    "original",
    between(
        "185 ms and 3,200 MB are of one forward pass", "layers that would take 185 ms", *LAYERS,
        "the layers that published language models have, if scores are kept for one layer at a time", neutral=None,
    ),
    at_most(
        "the formula changes no accuracy", "largest error beside float64", 1e-5,
        "rounding of float32 in sums of 2,048 terms",
    ),
)  # fmt: skip
def original(lab: Lab) -> Iterator[Finding]:
    """Compare the formula in float32 with float64, and compute which batch and how many layers the figures imply."""
    import torch

    from vllm_teach.attention import naive_attention
    from vllm_teach.attention.traffic import naive_traffic

    qkv = attention_inputs(Lab(), a100.LENGTH)
    with torch.inference_mode():
        error = (naive_attention(*qkv, causal=True) - naive_attention(*(x.double() for x in qkv), causal=True)).abs()
    yield counted("largest error beside float64", float(error.max()), "", "one head of 128, 2,048 tokens, float32")
    one = 2 * a100.HEADS * a100.LENGTH**2 * 2  # S and P of one sequence in float16
    batch = _B("original", "memory_mb") * 1e6 / one
    yield arithmetic("batch if 3,200 MB are S and P", batch, "sequences", f"{one / 1e6:.0f} MB for one, one layer")
    work = naive_traffic(**a100.layer_sizes(batch=round(batch)))
    layer = a100.seconds_by_step(work.by_name, a100.card())
    yield modelled(
        "layers that would take 185 ms", _B("original", "time_ms") / 1e3 / layer, "layers",
        f"A100 40GB, that batch: attention of a layer takes {layer * 1e3:.1f} ms at the least",
    )  # fmt: skip


@experiment(
    "B-xformers",
    "memory_efficient",
    *_faster("memory_efficient"),
    _smaller("memory_efficient"),
    between(
        "accuracy changes by 0.5 %", "change of the loss", 0.25, 1.0,
        "a factor of 2 around 0.5 %; read as \"less than 0.5 %\", it would hold", neutral=None,
    ),
)  # fmt: skip
def memory_efficient(lab: Lab) -> Iterator[Finding]:
    """Race chunked attention against the formula, and read a text with both in the same real model."""
    yield from _speed_and_memory(lab, "memory_efficient")
    reading = lab.once(read_patterns)
    yield counted("change of the loss", 100 * reading.exact_change, "%", f"{reading.setting}, its first 384 tokens")


@experiment(
    "B-xformers",
    "sparse_50_percent",
    *_faster("sparse_50_percent"),
    _smaller("sparse_50_percent"),
    between(
        "accuracy changes by about 1 %", "perplexity, against full attention", 0.5, 2.0,
        "a factor of 2 around 1 %; the measure is not published", neutral=0.0,
    ),
)  # fmt: skip
def sparse(lab: Lab) -> Iterator[Finding]:
    """Race half of all causal blocks of 256 against the formula, and read a text through them in a real model."""
    yield from _speed_and_memory(lab, "sparse_50_percent")
    reading = lab.once(read_patterns)
    yield counted("perplexity, against full attention", 100 * reading.worse("half of the blocks"), "%", reading.setting)


@experiment(
    "B-xformers",
    "local_window_512",
    *_faster("local_window_512"),
    _smaller("local_window_512"),
    at_least(
        "it needs fine-tuning", "perplexity, against full attention", 5.0,
        "a model that loses 5 % without fine-tuning loses more than the articles' quantised ones, and needs it",
    ),
)  # fmt: skip
def window(lab: Lab) -> Iterator[Finding]:
    """Race a causal window of 512 against the formula, and read a text through it in a model not trained for it."""
    yield from _speed_and_memory(lab, "local_window_512")
    reading = lab.once(read_patterns)
    yield counted("perplexity, against full attention", 100 * reading.worse("window"), "%", reading.setting)
