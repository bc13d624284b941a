"""How steeply a cost grows with a size: the power p of a cost that behaves like size^p."""

import math
from collections.abc import Sequence

from vllm_teach.errors import InvalidArgumentError


def log_log_slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of the straight line through (log size, log cost) by least squares: 1 is linear, 2 quadratic.

    Between two points it is log(cost ratio) / log(size ratio). Raises InvalidArgumentError for fewer than two different
    sizes, lists of unequal length, and numbers that are not above 0.
    """
    if len(costs) != len(sizes):
        raise InvalidArgumentError(f"costs has {len(costs)} entries and sizes {len(sizes)}: give one cost per size.")
    if len(set(sizes)) < 2:
        raise InvalidArgumentError(f"sizes={list(sizes)} gives no slope: use two different sizes or more.")
    if not all(number > 0 for number in (*sizes, *costs)):
        raise InvalidArgumentError(f"sizes={list(sizes)} or costs={list(costs)} has no logarithm: use numbers above 0.")
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - x_mean) ** 2 for x in xs)
