"""Which attention for which use: three recommendations, read by a real model (B-xformers' scenarios)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.check import at_least, at_most
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.experiments.attention_modes import race_modes
from vllm_teach.validation.audit.experiments.pattern_reading import Reading, read_patterns
from vllm_teach.validation.audit.finding import Finding, arithmetic, counted, measured
from vllm_teach.validation.audit.lab import Lab

_KEEPS = "above 5 % a pattern loses more than the articles' quantised models, which they call a loss"
_COPIES = "a model that finds the passage reads it with less than half the loss of the first time"


def _again(reading: Reading, name: str) -> float:
    return reading.again[name] / reading.first


@experiment(
    "B-xformers",
    "text_generation",
    at_most("a window of 512 writes as well as full attention", "perplexity, window", 5.0, _KEEPS),
    at_least(
        "the window makes it faster", "time without a window / with", 1.05, "5 %: less is not worth a pattern", 1.0,
    ),
)  # fmt: skip
def text_generation(lab: Lab) -> Iterator[Finding]:
    """Read a text through a window of 512, without and with four attention sinks, in a model trained without."""
    reading = lab.once(read_patterns)
    yield counted("perplexity, window", 100 * reading.worse("window"), "%", reading.setting)
    sinks = 100 * reading.worse("window and sinks")
    yield counted("perplexity, window and 4 sinks", sinks, "%", f"{reading.setting}; not what the article recommends")
    modes = lab.once(race_modes)
    pairs = (modes.race.seconds[mode].samples for mode in ("memory_efficient", "local_window_512"))
    faster = Timing.of([whole / window for whole, window in zip(*pairs, strict=True)])
    yield measured("time without a window / with", faster, "x", f"2,048 tokens; {modes.setting}")
    yield arithmetic("keys kept at 8,192 tokens", 512 / 8192, "of all", "512 / 8,192, by definition")
    yield counted(
        "loss of a passage that comes again, window", _again(reading, "window"), "of the first time", reading.setting
    )


@experiment(
    "B-xformers",
    "document_summarisation",
    at_most("it reads as well as full attention", "perplexity, blocks", 5.0, _KEEPS),
    at_most("it finds what stood far above, as a summary must", "loss of a passage that comes again", 0.5, _COPIES),
)
def document_summarisation(lab: Lab) -> Iterator[Finding]:
    """Read a text where blocks of 256 see their neighbour and the first block, and a passage from another block."""
    reading = lab.once(read_patterns)
    name = "neighbour and first block"
    yield counted("perplexity, blocks", 100 * reading.worse(name), "%", reading.setting)
    yield counted("loss of a passage that comes again", _again(reading, name), "of the first time", reading.setting)


@experiment(
    "B-xformers",
    "code_completion",
    at_most("full attention finds what stood far above", "loss again, full attention", 0.5, _COPIES),
    at_least(
        "nothing less does", "loss again, the best of the patterns", 0.5,
        "a pattern that reads it with less than half the loss would do as well",
    ),
)  # fmt: skip
def code_completion(lab: Lab) -> Iterator[Finding]:
    """Let a passage come again, as names and calls do in code, under full attention and under each pattern."""
    reading = lab.once(read_patterns)
    yield counted("loss again, full attention", _again(reading, "full"), "of the first time", reading.setting)
    patterns = {name: _again(reading, name) for name in reading.again if name != "full"}
    best = min(patterns, key=lambda name: patterns[name])
    told = ", ".join(f"{name} {loss:.2f}" for name, loss in patterns.items())
    yield counted(
        "loss again, the best of the patterns", patterns[best], "of the first time", f"{told}; {reading.setting}"
    )
