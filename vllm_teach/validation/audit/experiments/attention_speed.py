"""FlashAttention against the formula: time, memory, bytes (B-flash-attention, A-attention-2048)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit import a100
from vllm_teach.validation.audit.check import between, near, published, whole_model
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured, modelled
from vllm_teach.validation.audit.lab import Lab

if TYPE_CHECKING:
    import torch

    from vllm_teach.performance.side_by_side import Race

_B = published("B-flash-attention")
_FACTOR = 2.0
_WHY_FACTOR = (
    "a factor of 2, because batch, heads and mask are not published, and skipping the masked tiles alone is worth 2"
)
# The second article's formula has no mask; a language model's prefill, which the first one measures, is causal.
_CASES = ((2048, False), (2048, True), (4096, False))
_FRACTION = published("A-attention-2048")("attention_time_fraction_of_baseline", "optimised")
_WHY_MODELLED = "the same; a roofline bounds the ratio on neither side"
_WHICH = {"baseline": "naive", "optimised": "tiled"}
_TIME, _TIME_4096 = "time at 2,048, naive / tiled", "time at 4,096, naive / tiled"
_GROWTH = "ratio at 4,096 / ratio at 2,048"


@dataclass(frozen=True)
class LayerRace:
    """The naive and the tiled call at (length, causal or not): seconds in the same rounds, and peak bytes."""

    races: dict[tuple[int, bool], Race]
    peaks: dict[tuple[int, bool], dict[str, int]]
    setting: str


def tiled_backend(device: str) -> str:
    """Return the compiled tiled attention of this device: ours where it can be built, else PyTorch's."""
    from vllm_teach import backends

    ours = "triton" if device.startswith("cuda") else "cpu"
    return ours if backends.get(ours).unavailable() is None else "sdpa"


def attention_inputs(lab: Lab, length: int) -> list[torch.Tensor]:
    """Return q, k and v of the articles' layer: one head in float32 on a processor, all in half precision on a GPU.

    A head costs what a head costs, and a processor has no half precision to speak of.
    """
    import torch

    batch, heads, dtype = (a100.BATCH, a100.HEADS, torch.float16) if lab.on_gpu else (1, 1, torch.float32)
    source = torch.Generator().manual_seed(0)
    drawn = [torch.randn(batch, length, heads, a100.HEAD_DIM, generator=source) for _ in range(3)]
    return [tensor.to(lab.device, dtype) for tensor in drawn]


def race_layer(lab: Lab) -> LayerRace:
    """Time the formula beside the compiled tiled kernel, forward."""
    import torch

    from vllm_teach import backends
    from vllm_teach.performance.memory import peak_memory
    from vllm_teach.performance.side_by_side import race

    tiled = tiled_backend(lab.device)
    races, peaks = {}, {}
    with torch.inference_mode(), lab.one_thread():
        for length, causal in _CASES:
            qkv = attention_inputs(lab, length)
            calls: dict[str, Callable[[], object]] = {
                name: partial(backends.get(backend).run, *qkv, causal=causal)
                for name, backend in (("tiled", tiled), ("naive", "naive"))
            }
            races[length, causal] = race(calls, "tiled", rounds=lab.pick(11, 5), warmup=2, device=lab.device)
            peaks[length, causal] = {name: peak_memory(call, lab.device) for name, call in calls.items()}
    size = f"batch {a100.BATCH}, 16 heads of 128, float16" if lab.on_gpu else "one head of 128, float32, one thread"
    return LayerRace(races, peaks, f"{size}, forward; tiled is the backend {tiled!r}")


@experiment(
    "A-attention-2048",
    "attention_time_fraction_of_baseline",
    near(
        "optimised attention takes 0.23 of the baseline's time",
        "time at 2,048, tiled / naive",
        _FRACTION,
        _FACTOR,
        _WHY_FACTOR,
    ),
    near("and on an A100", "the same on an A100, causal", _FRACTION, _FACTOR, _WHY_MODELLED),
)
def fraction(lab: Lab) -> Iterator[Finding]:
    """Time plain attention and the compiled tiled kernel in the same rounds, as in a prefill of 2,048 tokens."""
    layer = lab.once(race_layer)
    fractions = Timing.of([1 / ratio for ratio in layer.races[2048, True].ratios["naive"].samples])
    yield measured("time at 2,048, tiled / naive", fractions, "", f"{layer.setting}, causal")
    for mask, ratio in _modelled_ratios(2048).items():
        yield modelled(f"the same on an A100, {mask}", 1 / ratio, "", "float16, batch 8, roofline of its data sheet")


@experiment(
    "B-flash-attention",
    "time_ms",
    near("FlashAttention is 3.0 times as fast", _TIME, _B("time_ms", "ratio"), _FACTOR, _WHY_FACTOR),
    near("and on an A100", "the ratio on an A100, no mask", _B("time_ms", "ratio"), _FACTOR, _WHY_MODELLED),
    *(
        whole_model(f"{_B('time_ms', which):.0f} ms are of a model's layers", f"layers of the {which} on this A100")
        for which in _WHICH
    ),
)  # fmt: skip
def time_ratio(lab: Lab) -> Iterator[Finding]:
    """Race naive and tiled attention at 2,048 tokens; model both on an A100; ask which batch would take 185 ms."""
    layer = lab.once(race_layer)
    bare, masked = (layer.races[2048, causal] for causal in (False, True))
    yield measured(_TIME, bare.ratios["naive"], "x", f"{layer.setting}, no mask, as in the article's formula")
    yield measured("the same under a causal mask", masked.ratios["naive"], "x", f"{layer.setting}; skips masked tiles")
    if lab.is_a100:
        for which, name in _WHICH.items():
            yield layers_here(
                f"layers of the {which} on this A100", _B("time_ms", which), bare.seconds[name], layer.setting
            )
    for mask, ratio in _modelled_ratios(2048).items():
        yield modelled(f"the ratio on an A100, {mask}", ratio, "x", "float16, batch 8, roofline of its data sheet")
    one = _naive_seconds(2048, 1)
    yield modelled(
        "batch at which one naive layer takes 185 ms", _B("time_ms", "baseline") / 1e3 / one, "sequences",
        f"A100 40GB: one sequence takes {one * 1e3:.2f} ms at the least, so the figure is not of one layer",
    )  # fmt: skip


@experiment(
    "B-flash-attention",
    "memory_mb",
    near(
        "FlashAttention takes 2.9 times less memory", "peak beyond q, k and v, naive / tiled", _B("memory_mb", "ratio"),
        _FACTOR, "a factor of 2 for what is not published: q, k, v and weights may or may not be counted",
    ),
    near(
        "and so it does with q, k, v and out counted", "with q, k, v and out, naive / tiled", _B("memory_mb", "ratio"),
        _FACTOR, "the same; arithmetic, at any batch",
    ),
)  # fmt: skip
def memory_ratio(lab: Lab) -> Iterator[Finding]:
    """Count the peak bytes of both calls, and compute which batch would make the published megabytes."""
    layer = lab.once(race_layer)
    peak = layer.peaks[2048, False]
    ratio = peak["naive"] / peak["tiled"]
    yield counted("peak beyond q, k and v, naive / tiled", ratio, "x", layer.setting)
    matrices = 2 * a100.HEADS * a100.LENGTH**2 * 2  # S and P, float16
    vectors = 4 * a100.HEADS * a100.HEAD_DIM * a100.LENGTH * 2  # q, k, v and out
    both = (matrices + vectors) / vectors
    yield arithmetic("with q, k, v and out, naive / tiled", both, "x", "16 heads of 128, float16: S and P beside them")
    yield arithmetic(
        "batch if S and P were all 3,200 MB", _B("memory_mb", "baseline") * 1e6 / matrices, "sequences",
        f"S and P of one sequence are {matrices / 1e6:.0f} MB",
    )  # fmt: skip
    saved = (_B("memory_mb", "baseline") - _B("memory_mb", "optimised")) * 1e6
    yield arithmetic("batch by the difference of the rows", saved / matrices, "sequences", "2,100 MB of S and P")


@experiment(
    "B-flash-attention",
    "bandwidth_gb_s",
    near(
        "the bytes that the rows imply fall as those of the mechanism do", "bytes by the rows, baseline / optimised",
        2.0, 1.25, "by exact count the tiled loop moves 2.0 times fewer bytes without a mask, still fewer with one",
        None,
    ),
    near(
        "the bandwidth attained rises 2.7 times", "bandwidth on an A100, tiled / naive",
        _B("bandwidth_gb_s", "ratio"), _FACTOR, "a factor of 2 for what a roofline leaves out",
    ),
)  # fmt: skip
def bandwidth(lab: Lab) -> Iterator[Finding]:
    """Multiply the published times and bandwidths, and set the bytes that they imply beside those that are counted."""
    from vllm_teach.attention.traffic import naive_traffic, tiled_traffic

    bytes_of = {which: _B("time_ms", which) / 1e3 * _B("bandwidth_gb_s", which) for which in ("baseline", "optimised")}
    yield arithmetic(
        "bytes by the rows, baseline / optimised", bytes_of["baseline"] / bytes_of["optimised"], "x",
        f"185 ms x 580 GB/s = {bytes_of['baseline']:.0f} GB, 62 ms x 1,580 GB/s = {bytes_of['optimised']:.0f} GB",
    )  # fmt: skip
    naive = naive_traffic(**a100.layer_sizes())
    tiled = tiled_traffic(**a100.layer_sizes(), **a100.tiled_sizes())
    yield counted("bytes counted, naive / tiled, no mask", naive.bytes_moved / tiled.bytes_moved, "x", "the loops")
    rates = {
        name: work.bytes_moved / spent
        for name, work, spent in (
            ("naive", naive, _naive_seconds(2048, a100.BATCH)),
            ("tiled", tiled, a100.seconds(tiled, a100.card())),
        )
    }
    yield modelled(
        "bandwidth on an A100, tiled / naive", rates["tiled"] / rates["naive"], "x",
        "roofline, no mask: memory limits both, so they attain the same and tiled attention moves less",
    )  # fmt: skip
    for name in a100.CARDS:
        hardware = a100.card(name)
        share = _B("bandwidth_gb_s", "optimised") * 1e9 / hardware.memory_bandwidth
        yield arithmetic(f"1,580 GB/s of the peak of an {hardware.title}", share, "x", hardware.source)


@experiment(
    "B-flash-attention",
    "speedup@4096",
    between(
        "5 to 8 times as fast at 4,096 tokens", _TIME_4096, _B("speedup@4096", "low"), _B("speedup@4096", "high"),
        "a factor of 1.25 beyond the published range, the spread of such a race", 1.25,
    ),
    near(
        "the ratio grows from 3.0 to at least 5", _GROWTH, _B("speedup@4096", "low") / _B("time_ms", "ratio"), 1.25,
        "5 / 3.0, the least growth that the two rows imply; a factor of 1.25 for the spread",
    ),
)  # fmt: skip
def at_4096(lab: Lab) -> Iterator[Finding]:
    """Race both at 4,096 tokens, and compare the ratio with that at 2,048; count the bytes at both lengths."""
    layer = lab.once(race_layer)
    long, short = (layer.races[length, False].ratios["naive"] for length in (4096, 2048))
    yield measured(_TIME_4096, long, "x", f"{layer.setting}, no mask")
    growth = Timing.of([ratio / short.median for ratio in long.samples])
    yield measured(_GROWTH, growth, "x", f"{layer.setting}, no mask")
    bare, masked = (_modelled_ratios(4096)[mask] / _modelled_ratios(2048)[mask] for mask in ("no mask", "causal"))
    yield modelled("that growth on an A100, no mask", bare, "x", "roofline, batch 8")
    yield modelled("that growth on an A100, causal", masked, "x", "roofline, batch 8")


def layers_here(name: str, milliseconds: float, layer: Timing, setting: str) -> Finding:
    """Return how many layers a published time is of, by the clock of one."""
    counts = Timing.of([milliseconds / 1e3 / each for each in layer.samples])
    return measured(name, counts, "layers", f"{milliseconds:g} ms / one layer; {setting}")


def _naive_seconds(length: int, batch: int) -> float:
    from vllm_teach.attention.traffic import naive_traffic

    return a100.seconds_by_step(naive_traffic(**a100.layer_sizes(length, batch)).by_name, a100.card())


def _modelled_ratios(length: int) -> dict[str, float]:
    """Return how many times faster the tiled loop is on an A100 by its data sheet, by mask."""
    from vllm_teach.attention.traffic import tiled_traffic

    naive = _naive_seconds(length, a100.BATCH)
    sizes = {**a100.layer_sizes(length), **a100.tiled_sizes()}
    return {
        mask: naive / a100.seconds(tiled_traffic(**sizes, causal=mask == "causal"), a100.card())
        for mask in ("no mask", "causal")
    }
