"""Least squares with coefficients that are not negative: a cost is never a gain."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from vllm_teach.errors import InvalidArgumentError

_MOST_COLUMNS = 10


def non_negative_least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return x >= 0, float64 `[terms]`, with the least |columns x - target|; `columns` is `[points, terms]`.

    At the best x the terms that are not 0 are their own least-squares solution (Lawson and Hanson, "Solving least
    squares problems", 1974, chapter 23), so that for a few terms all choices of them can be tried. Raises
    InvalidArgumentError for more than 10 terms, and for shapes that do not fit together.
    """
    if columns.ndim != 2 or columns.shape[1] > _MOST_COLUMNS or target.shape != columns.shape[:1]:
        raise InvalidArgumentError(
            f"columns has shape {list(columns.shape)} and target {list(target.shape)}: give [points, terms], at most "
            f"{_MOST_COLUMNS} terms, and [points]."
        )
    terms = columns.shape[1]
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    scaled = columns / scale  # seconds per byte and per step differ by ten powers of ten
    best, least = np.zeros(terms), float(target @ target)
    for count in range(1, terms + 1):
        for chosen in map(list, combinations(range(terms), count)):
            found = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            if (found >= 0).all():
                rest = target - scaled[:, chosen] @ found
                if (error := float(rest @ rest)) < least:
                    best, least = np.zeros(terms), error
                    best[chosen] = found
    return best / scale
