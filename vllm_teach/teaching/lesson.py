"""The first call of every notebook: pin what would otherwise make two runs print different text."""

import os
import random
from numbers import Integral

import numpy as np
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style


def begin(lesson: str, *, threads: int = 2, seed: int = 0) -> None:
    """Fix threads, seeds and the look of figures, keep libraries quiet, and print a line that is the same everywhere.

    Call it in the first code cell, after the imports. Two threads on every machine: a float32 sum split over another
    number of threads is added in another order and may differ in its last digit. CPU and float32 are what compared
    cells use; a cell that follows the machine it runs on is tagged `nbval-ignore-output`.

    lesson: the notebook's name without ".ipynb", printed.
    Mutates: torch's thread count; the seeds of torch, numpy and random; matplotlib's rcParams; two variables of
        the environment.
    Raises: InvalidArgumentError for `threads` below 1, a `seed` that NumPy does not take, below 0 or from 2**32 on, and
        numbers that are not whole.
    """
    if not _is_whole(threads) or threads < 1:
        raise InvalidArgumentError(f"threads must be at least 1, but it is {threads!r}.")
    if not _is_whole(seed) or not 0 <= seed < 2**32:
        raise InvalidArgumentError(f"seed must be a whole number from 0 to 2**32 - 1, but it is {seed!r}.")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar goes to stderr and never looks the same twice
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the lessons read only what `vllm-teach fetch` has brought
    style.apply()
    print(f"{lesson}: device cpu, dtype float32, {threads} thread{'s' if threads > 1 else ''}, seed {seed}")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
