"""The check that starts a backend's `run`: arguments that fit together, and that this backend can serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch

from vllm_teach.attention.layout import Layout
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant, VariantArguments
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError


class CheckedCall(NamedTuple):
    """A call that the backend serves: its sizes and what changes the formula."""

    shape: AttentionShape
    variant: Variant


def check_call(
    supports: Callable[[AttentionSpec], str | None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout | None,
    **arguments: Unpack[VariantArguments],
) -> CheckedCall:
    """Return the call that a backend with this `supports` may serve.

    Raises InvalidArgumentError for arguments that do not fit together, and with the reason of `supports` otherwise.
    """
    spec, variant = AttentionSpec.with_variant(q, k, v, layout=layout, **arguments)
    if (reason := supports(spec)) is not None:
        raise InvalidArgumentError(reason)
    return CheckedCall(spec, variant)
