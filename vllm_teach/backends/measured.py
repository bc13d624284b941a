"""The policy "measured": what `vllm-teach tune` found on this machine, and how it is read between the measured sizes.

A series is one kind of call (causal prefill, decode, …) in one dtype and one width (batch * heads), timed at a few
lengths. Time is a power of the length over any short stretch, so between two lengths the logarithm of the time is
interpolated linearly over that of the length. Beyond the longest the last stretch goes on; below the shortest a call
costs what it costs to start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_teach.attention.shapes import check_count
from vllm_teach.backends.bands import band_of
from vllm_teach.backends.preference import HAVE_LAYOUTS
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

# A pattern that shows less than this share of the pairs is timed like a local window, any other like a causal mask.
SPARSE = 0.3
KINDS = ("causal", "full", "local", "decode", "paged")
DTYPES = ("float32", "bfloat16")  # each stands for the other dtype of its kind, too


@dataclass(frozen=True)
class Series:
    """What stays the same while the length changes; `width` is batch * q_heads.

    Raises InvalidArgumentError unless `kind` is one of KINDS, `dtype` one of DTYPES and `width` at least 1.
    """

    kind: str
    dtype: str
    width: int

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, KINDS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise InvalidArgumentError(f"{name} is {value!r}; choose one of {', '.join(known)}.")
        check_count("width", self.width, 1)

    def __str__(self) -> str:
        return f"{self.kind}, {self.dtype}, {self.width} heads in all"


@dataclass(frozen=True, eq=False)
class Measurements:
    """Seconds of each backend at each length of each series: `seconds[series][backend][length]`."""

    machine: dict[str, str]
    seconds: dict[Series, dict[str, dict[int, float]]]

    def choose(self, spec: AttentionSpec, candidates: Sequence[str]) -> tuple[str, str, dict[str, str]] | None:
        """Return (choice, reason, why not the other candidates), or None when nothing like the call was timed.

        The nearest series stands for the call: float16 counts as bfloat16 and float64 as float32, the head size, the
        groups, softcap and ALiBi are left out of account. Training was not timed.
        """
        if spec.requires_grad:
            return None
        estimates = {name: seconds for name in candidates if (seconds := self.estimate(spec, name)) is not None}
        if not estimates:
            return None
        choice = min(estimates, key=estimates.__getitem__)
        series = self._nearest(spec)
        others = {
            name: _times_as_long(estimates[name], estimates[choice]) if name in estimates else "It was not timed."
            for name in candidates
            if name != choice
        }
        reason = f"About {estimates[choice] * 1e3:.3g} ms, the fastest by the timings of this machine ({series})."
        return choice, reason, others

    def estimate(self, spec: AttentionSpec, backend: str) -> float | None:
        """Return the seconds that a call should take, or None when the backend was not timed in such a series."""
        series = self._nearest(spec)
        points = self.seconds.get(series, {}).get(backend) if series is not None else None
        if not points or series is None:
            return None
        one = interpolate(points, length_of(spec))
        if spec.layout == "dense" or backend in HAVE_LAYOUTS or series.kind == "paged":
            return one * spec.batch * spec.q_heads / series.width
        # It goes through the sequences one after the other: each call has its own start.
        return spec.batch * one

    def _nearest(self, spec: AttentionSpec) -> Series | None:
        kind, dtype = kind_of(spec), "float32" if spec.dtype in (torch.float32, torch.float64) else "bfloat16"
        width = spec.batch * spec.q_heads
        fitting = [series for series in self.seconds if (series.kind, series.dtype) == (kind, dtype)]
        return min(fitting, key=lambda series: abs(math.log(max(1, width) / series.width)), default=None)

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` reads."""
        rows = [
            {"kind": series.kind, "dtype": series.dtype, "width": series.width, "seconds": by_backend}
            for series, by_backend in self.seconds.items()
        ]
        return {"machine": self.machine, "series": rows}

    @classmethod
    def from_json(cls, data: dict) -> Measurements:
        """Read what `to_json` wrote; KeyError, TypeError, AttributeError or ValueError for anything else."""
        seconds = {}
        for row in data["series"]:
            by_backend = {
                str(name): {int(length): float(value) for length, value in points.items()}
                for name, points in row["seconds"].items()
            }
            series = Series(str(row["kind"]), str(row["dtype"]), int(row["width"]))
            timed = [point for points in by_backend.values() for point in points.items()]
            # Their logarithms are taken.
            if not all(length >= 1 and 0 < value < math.inf for length, value in timed):
                raise ValueError(f"The series {series} has a length or a time that nothing has.")
            seconds[series] = by_backend
        return cls({str(name): str(value) for name, value in data["machine"].items()}, seconds)

    def __str__(self) -> str:
        lines = [", ".join(self.machine.values()), ""]
        for series, by_backend in self.seconds.items():
            lines.append(str(series))
            for length in sorted({length for points in by_backend.values() for length in points}):
                timed = sorted((points[length], name) for name, points in by_backend.items() if length in points)
                shown = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for seconds, name in timed)
                lines.append(f"  n = {length:>6,}  {shown}")
        return "\n".join(lines)


def _times_as_long(seconds: float, fastest: float) -> str:
    """Say how much slower; a call without sequences takes no time on any backend."""
    return f"It takes {seconds / fastest:.1f} times as long." if fastest else "It takes no time either."


def kind_of(spec: AttentionSpec) -> str:
    """Return the kind of call, one of KINDS, that a spec is timed like."""
    if spec.q_len <= 1:
        return "paged" if spec.layout == "paged" else "decode"
    if spec.pattern is None:
        return "full"
    if band_of(spec.pattern, spec.q_len, spec.kv_len) in ((-1, -1), (-1, 0)):
        return "causal"
    return "local" if spec.pattern.density(spec.q_len, spec.kv_len) < SPARSE else "causal"


def length_of(spec: AttentionSpec) -> float:
    """Return the length at which a series is read: the keys in a decoding step, else the side of as large a square."""
    return float(spec.kv_len) if spec.q_len <= 1 else math.sqrt(spec.q_len * spec.kv_len)


def interpolate(points: dict[int, float], length: float) -> float:
    """Return the seconds at `length`, at least 1, from those at the lengths of `points`; see the module's text."""
    lengths = sorted(points)
    if len(lengths) == 1:
        return points[lengths[0]]
    place = min(max(sum(known <= length for known in lengths), 1), len(lengths) - 1)
    low, high = lengths[place - 1], lengths[place]
    slope = math.log(points[high] / points[low]) / math.log(high / low)
    if length < low:
        return points[low]
    return points[low] * (max(length, 1.0) / low) ** slope
