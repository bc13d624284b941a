"""What `vllm-teach bench quantization` compares, and whether it can: asked before the minutes that it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.load import load_config
from vllm_teach.models.quantize import check_quantizable
from vllm_teach.quantization.bootstrap import BLOCK
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.quantization.sliding_window import check_window

BASELINE = "bf16"
_WINDOW = 1024
# All but the first are scored, and their perplexity's interval is drawn from two blocks at least.
_FEWEST_TOKENS = BLOCK + 2


@dataclass(frozen=True)
class Variant:
    """One way to store the weights: unquantised in `dtype`, or as `config` says, computed in `dtype`."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    config: QuantizationConfig | None = None


def _quantized(name: str, method: str, bits: int | None = None, head_bits: int = 16) -> Variant:
    return Variant(name, config=QuantizationConfig.choose(method, bits=bits, head_bits=head_bits))


VARIANTS = (
    Variant("fp32", torch.float32),
    Variant(BASELINE),
    _quantized("int8", "int8"),
    _quantized("rtn4", "rtn", 4),
    _quantized("gptq4", "gptq", 4),
    _quantized("awq4", "awq", 4),
    _quantized("awq4, int8 head", "awq", 4, head_bits=8),
    _quantized("rtn3", "rtn", 3),
    _quantized("gptq3", "gptq", 3),
    _quantized("awq3", "awq", 3),
)


def check_plan(
    source: Path,
    folder: Path | None = None,
    *,
    tokens: int | None = None,
    variants: tuple[Variant, ...] = VARIANTS,
    window: int | None = None,
) -> int:
    """Return how many tokens a window over the text has: `window`, or 1,024, or the context of the model in `source`.

    Raises InvalidArgumentError when `variants` lacks "bf16", when the model is quantised already or does not suit a
    variant, for a `window` below 2 or beyond its context, for fewer than 258 `tokens` to score (None: not known
    yet), and for a `folder` in which nothing can be written. Otherwise as `load_config`.
    """
    if BASELINE not in [variant.name for variant in variants]:
        raise InvalidArgumentError(f"variants has no {BASELINE!r}, which all are compared with: add it.")
    context = load_config(source).max_position
    window = check_window(min(_WINDOW, context) if window is None else window, context)
    for variant in variants:
        if variant.config is not None:
            check_quantizable(source, variant.config)
    if tokens is not None and tokens < _FEWEST_TOKENS:
        raise InvalidArgumentError(
            f"tokens={tokens} are too few for an interval of their perplexity: score {_FEWEST_TOKENS} or more."
        )
    if folder is not None:
        _check_folder(folder)
    return window


def _check_folder(folder: Path) -> None:
    try:
        nearest = next(each for each in (folder, *folder.parents) if each.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(f"{nearest} is a file")
        if not os.access(nearest, os.W_OK):
            raise PermissionError(f"{nearest} is read-only")
    except OSError as error:
        raise InvalidArgumentError(
            f"folder={str(folder)!r} cannot hold the quantised models ({error}): give another folder."
        ) from error
