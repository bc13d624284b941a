"""One call for all backends: select, run, count."""

from __future__ import annotations

import time
import warnings
from typing import Unpack

import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Layout
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.counts import record_call
from vllm_teach.backends.hardware import detect_hardware
from vllm_teach.backends.selection import DEFAULT_THRESHOLD, select_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError

AUTO = "auto"


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str = AUTO,
    policy: str = "threshold",
    threshold: int = DEFAULT_THRESHOLD,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    """Return the attention output of `backend`, by default of the one that `select_backend` chooses for this call.

    The tensors and `arguments` are those of `spec.Backend.run`, `policy` and `threshold` those of `select_backend`.
    The call is counted (`backends.calls`). Raises what `run` and `select_backend` raise.
    """
    if backend != AUTO:
        return _run(backend, q, k, v, layout, **arguments)
    spec = AttentionSpec.of(q, k, v, layout=layout, **arguments)
    choice = select_backend(spec, policy, threshold).choice
    while True:
        try:
            return _run(choice, q, k, v, layout, **arguments)
        except MissingDependencyError as error:
            # A library may turn out not to build or load only when it is first used; its backend says so from then on,
            # so that each turn of this loop has one candidate less.
            detect_hardware.cache_clear()
            second = select_backend(spec, policy, threshold).choice
            if second == choice:
                raise
            message = f"The backend {choice} failed, {second} serves instead. {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            choice = second


def _run(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout | None,
    **arguments: Unpack[VariantArguments],
) -> torch.Tensor:
    implementation = backends.get(name)
    start = time.perf_counter()
    out = implementation.run(q, k, v, layout=layout, **arguments)
    record_call(name, time.perf_counter() - start)
    return out
