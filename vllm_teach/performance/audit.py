"""Does a selection choose well? Time every usable backend at sizes that `tune` did not use, and compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_teach import backends
from vllm_teach.attention.shapes import check_count
from vllm_teach.backends.measured import Measurements, Series
from vllm_teach.backends.selection import check_names, select_backend
from vllm_teach.backends.tuning_file import describe_machine
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.tuning import make_call, tunable

# Between the lengths of the sweep, and beyond its widths.
POINTS = (
    (Series("causal", "float32", 8), 300),
    (Series("causal", "bfloat16", 16), 900),
    (Series("full", "float32", 16), 700),
    (Series("local", "float32", 8), 1400),
    (Series("decode", "bfloat16", 32), 600),
    (Series("paged", "float32", 16), 2000),
)


@dataclass(frozen=True)
class Verdict:
    """One size: what was chosen, what was fastest, and how many times the fastest's time the choice took."""

    series: Series
    length: int
    choice: str
    fastest: str
    ratio: float


def audit(
    policy: str = "measured",
    measurements: Measurements | None = None,
    points: Sequence[tuple[Series, int]] = POINTS,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    rounds: int = 7,
) -> list[Verdict]:
    """Return a verdict for each of `points`; all backends run in every round, and ratios are medians over rounds.

    `names` are the backends to choose among, by default those that `tune` times.
    Raises what `select_backend` raises, and InvalidArgumentError for `rounds` below 1 or a device that is not there.
    """
    check_count("rounds", rounds, 1)
    describe_machine(device)  # refuses a device where nothing can be timed
    among = tunable(device) if names is None else check_names("names", names)
    verdicts = []
    for series, length in points:
        call = make_call(series, length, device)
        spec = call.spec()
        able = [name for name in among if backends.get(name).supports(spec) is None]
        choice = select_backend(spec, policy, usable=able, measurements=measurements).choice
        with torch.no_grad():
            runs = {name: call.of(backends.get(name)) for name in able}
            seconds = race(runs, choice, rounds=rounds, device=device).seconds
        fastest = min(able, key=lambda name: seconds[name].median)
        taken = zip(seconds[choice].samples, seconds[fastest].samples, strict=True)
        ratio = statistics.median(chosen / best for chosen, best in taken)
        verdicts.append(Verdict(series, length, choice, fastest, ratio))
    return verdicts
