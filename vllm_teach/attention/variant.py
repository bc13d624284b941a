"""What changes the formula softmax(q k^T * scale) v: masks, softcap, ALiBi, dropout, as one checked value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch

from vllm_teach.attention.dropout import check_dropout
from vllm_teach.attention.patterns.base import Pattern
from vllm_teach.attention.patterns.simple import Causal, LocalWindow
from vllm_teach.attention.shapes import AttentionShape, check_count, check_real, check_scale, check_tensor
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence


# Scores are divided by it, in float32 too: of a number that is 0 there they would become NaN.
_LEAST_SOFTCAP = 1e-30


class VariantArguments(TypedDict, total=False):
    """The keyword arguments that every attention of this project takes; see `Variant`."""

    causal: bool
    scale: float | None
    window_size: Sequence[int]
    pattern: Pattern | None
    softcap: float
    alibi_slopes: torch.Tensor | None
    dropout_p: float
    dropout_seed: int | None


@dataclass(frozen=True, eq=False)
class Variant:
    """The arguments of one attention call beside q, k and v, checked and with their defaults filled in.

    - `scale`: a finite number, 1/sqrt(head_dim) by default.
    - `pattern`: the keys each query may see, all for None. `of` merges into it `causal` and `window_size`, which is
      FlashAttention's: (left, right) keys beside the query's own position, -1 for all. All are aligned bottom-right.
    - `softcap`: c > 0 replaces each scaled score s by c * tanh(s / c); 0 does not.
    - `alibi_slopes`: float32 `[q_heads]` or `[batch, q_heads]`; adds -slope * |position of query - position of key|
      to the score, after softcap.
    - `dropout_p`, `dropout_seed`: each probability is set to 0 with probability p and else divided by 1 - p;
      the log-sum-exp does not see it. Which ones: `dropout.keep_mask`.
    """

    scale: float
    pattern: Pattern | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        device: torch.device,
        *,
        causal: bool = False,
        scale: float | None = None,
        window_size: Sequence[int] = (-1, -1),
        pattern: Pattern | None = None,
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
    ) -> Variant:
        """Check the arguments of a call with such sizes and merge its masks.

        Raises InvalidArgumentError, naming the argument, for one that cannot work.
        """
        return cls(
            scale=check_scale(scale, shape.head_dim),
            pattern=merge_masks(causal, window_size, pattern),
            softcap=_check_softcap(softcap),
            alibi_slopes=_check_slopes(alibi_slopes, shape, device),
            dropout_seed=check_dropout(dropout_p, dropout_seed),
            dropout_p=float(dropout_p),
        )


def merge_masks(causal: bool, window_size: Sequence[int] = (-1, -1), pattern: Pattern | None = None) -> Pattern | None:
    """Return one pattern that shows what all three show; None when they show everything.

    Raises InvalidArgumentError when one of them is of the wrong type or the window has a value below -1.
    """
    if not isinstance(causal, bool):
        raise InvalidArgumentError(f"causal is {causal!r}; give True or False.")
    if not isinstance(window_size, list | tuple) or len(window_size) != 2:
        raise InvalidArgumentError(f"window_size is {window_size!r}; give (left, right), -1 for no limit.")
    if pattern is not None and not isinstance(pattern, Pattern):
        raise InvalidArgumentError(
            f"pattern is of type {type(pattern).__name__}; give a Pattern of vllm_teach.attention.patterns or None."
        )
    left, right = (check_count(f"window_size[{i}]", size, -1) for i, size in enumerate(window_size))
    right = 0 if causal else right
    band: Pattern | None = None if left == right == -1 else LocalWindow(left, right)
    if (left, right) == (-1, 0):
        band = Causal()
    if pattern is None or band is None:
        return pattern if band is None else band
    return band & pattern


def _check_softcap(softcap: float) -> float:
    value = check_real("softcap", softcap)
    if value < 0 or 0 < value < _LEAST_SOFTCAP:
        raise InvalidArgumentError(f"softcap is {softcap!r}; give 0 for none, or a number from {_LEAST_SOFTCAP}.")
    return value


def _check_slopes(slopes: torch.Tensor | None, shape: AttentionShape, device: torch.device) -> torch.Tensor | None:
    if slopes is None:
        return None
    check_tensor("alibi_slopes", slopes, " of float32, or None")
    fits = tuple(slopes.shape) in ((shape.q_heads,), (shape.batch, shape.q_heads))
    if slopes.dtype != torch.float32 or not fits:
        raise InvalidArgumentError(
            f"alibi_slopes has dtype {slopes.dtype} and shape {list(slopes.shape)}; it must be float32 of shape "
            f"[{shape.q_heads}] or [{shape.batch}, {shape.q_heads}]."
        )
    if slopes.device != device:
        raise InvalidArgumentError(f"alibi_slopes is on {slopes.device} and q on {device}; move one to the other.")
    return slopes
