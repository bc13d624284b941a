"""What a training run is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError

DTYPES = ("bf16", "fp32")
_SEEDS = 2**63  # as many as PyTorch's generators take


@dataclass(frozen=True)
class TrainingOptions:
    """The settings of one run; equal settings, tokens and threads give equal losses, bit for bit, on one machine.

    - `steps`, `batch_size` (windows a step), `window` (tokens a window).
    - `long_steps`, `long_window`: the last steps, which take fewer and longer windows, as many tokens in all. Most of
      what a model learns needs no long context, and attention's cost grows with it (BERT's recipe: Devlin et al. 2019,
      appendix A.2).
    - `dtype`: "bf16" multiplies matrices in bf16 under autocast, with weights, optimiser state and sums in float32;
      "fp32" does everything in float32.
    - `learning_rate` rises linearly over `warmup_steps` and then falls along a half cosine to `final_fraction` of it.
    - `weight_decay` (AdamW's, on matrices only), `betas` (AdamW's), `clip_norm` (of all gradients together).
    - `attention`: "memory_efficient" (xFormers' interface), or a backend of `vllm_teach.backends` that has gradients.
    - `attention_dropout` on the attention probabilities, `residual_dropout` on what each block adds to the stream and
      on the embeddings.
    - `seed` decides initial weights, order of the windows and dropout.
    - `evaluate_every`: steps between two looks at the dev tokens, if there are any; the last step gets one too.
    """

    steps: int = 1000
    batch_size: int = 16
    window: int = 256
    long_steps: int = 0
    long_window: int = 512
    dtype: str = "bf16"
    learning_rate: float = 2e-3
    final_fraction: float = 0.05
    warmup_steps: int = 50
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    attention: str = "memory_efficient"
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    seed: int = 0
    evaluate_every: int = 100

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError, naming the first setting that cannot work."""
        for name in ("steps", "batch_size", "window", "long_window", "evaluate_every"):
            self._check_whole(name, 1)
        for name in ("long_steps", "warmup_steps", "seed"):
            self._check_whole(name, 0)
        for name in ("learning_rate", "clip_norm"):
            self._check_number(name, "a positive number", lambda value: 0 < value < math.inf)
        self._check_number("weight_decay", "0 or a positive number", lambda value: 0 <= value < math.inf)
        self._check_number("final_fraction", "a number from 0 to 1", lambda value: 0 <= value <= 1)
        for name in ("attention_dropout", "residual_dropout"):
            self._check_number(name, "a probability from 0 up to, but not, 1", lambda value: 0 <= value < 1)
        self._check_betas()
        if self.seed >= _SEEDS:
            raise InvalidArgumentError(f"seed={self.seed} is not valid: give a whole number below 2**63.")
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(f"dtype={self.dtype!r} is not valid: use 'bf16' or 'fp32'.")
        if self.long_steps and self.batch_size * self.window < self.long_window:
            raise InvalidArgumentError(
                f"long_window={self.long_window} is not valid: a step has {self.batch_size * self.window} tokens."
            )

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Return how many windows of how many tokens `step` takes."""
        if step < self.steps - self.long_steps:
            return self.batch_size, self.window
        return self.batch_size * self.window // self.long_window, self.long_window

    def _check_whole(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise InvalidArgumentError(f"{name}={value!r} is not valid: give a whole number, {lowest} or more.")

    def _check_betas(self) -> None:
        betas = self.betas
        # A list is what a settings file gives back.
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise InvalidArgumentError(f"betas={betas!r} is not valid: give two numbers from 0 up to, but not, 1.")

    def _check_number(self, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise InvalidArgumentError(f"{name}={value!r} is not valid: give {wanted}.")
