"""The roofline: what rate a computation can attain, given how much it computes per byte it moves.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009), section 3.
"""

from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class Point:
    """One computation under the roofline: FLOPs per byte moved, FLOP/s attained, and its concept for the colour."""

    name: str
    intensity: float
    flops_per_second: float
    concept: str = "measured"

    @classmethod
    def of(cls, name: str, flops: float, nbytes: float, seconds: float, concept: str = "measured") -> "Point":
        """Place a computation that did `flops` and moved `nbytes` in `seconds`."""
        for argument, value in (("flops", flops), ("nbytes", nbytes), ("seconds", seconds)):
            _positive(argument, value)
        return cls(name, flops / nbytes, flops / seconds, concept)


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """Return the highest FLOP/s at `intensity` FLOP per byte: min(peak, bandwidth x intensity).

    `peak` is in FLOP/s, `bandwidth` in bytes/s. Raises InvalidArgumentError when one of them is not above 0.
    """
    for argument, value in (("intensity", intensity), ("peak", peak), ("bandwidth", bandwidth)):
        _positive(argument, value)
    return min(peak, bandwidth * intensity)


def _positive(argument: str, value: float) -> None:
    if not value > 0:
        raise InvalidArgumentError(f"{argument}={value} has no place under a roofline: use a number above 0.")
