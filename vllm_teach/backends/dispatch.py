"""One call for all backends: select, run, count."""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Unpack

import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Layout, check_once
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends.counts import record_call
from vllm_teach.backends.hardware import detect_hardware
from vllm_teach.backends.packed import READERS, is_packed, stand_ins
from vllm_teach.backends.selection import DEFAULT_THRESHOLD, select_backend
from vllm_teach.backends.spec import AttentionSpec, Preparing, Run
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError

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
            choice = _choose_another(choice, error, spec, policy, threshold)


class Prepared:
    """`attend` for many calls that differ in the numbers of q, k and v alone, as those of a model's layers do.

    The arguments are those of `attend`; q, k and v are the first call's, which is not made yet. The layout is checked
    and the backend chosen here, once; what it can prepare (`spec.Preparing`) it prepares in the first call. Call it
    with tensors of the same dtypes, shapes and strides, from one thread at a time; the layout's tensors must not change
    in between. Each call is counted. Raises what `attend` raises. `backend` is the name of what serves.

    k and v may be packed (see `backends.packed`), for those backends that read such caches.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        backend: str = AUTO,
        policy: str = "threshold",
        threshold: int = DEFAULT_THRESHOLD,
        layout: Layout | None = None,
        **arguments: Unpack[VariantArguments],
    ) -> None:
        self._packed = is_packed(k, layout)
        if self._packed:
            k, v = stand_ins(q, k, v)
            if backend not in (AUTO, *READERS):
                raise InvalidArgumentError(f"backend={backend!r} reads no packed cache: use {' or '.join(READERS)}.")
        self._layout = None if layout is None else check_once(q, k, v, layout)
        self._arguments = arguments
        self._options = policy, threshold
        self._spec: AttentionSpec | None = None
        if backend == AUTO:
            self._spec = AttentionSpec.of(q, k, v, layout=self._layout, **arguments)
            backend = select_backend(self._spec, policy, threshold, READERS if self._packed else None).choice
        self.backend = backends.get(backend).name
        self._run: Run | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention output, of q's shape and dtype."""
        start = time.perf_counter()
        while True:
            try:
                if self._run is None:
                    self._run = self._prepare(q, k, v)
                out = self._run(q, k, v)
                break
            except MissingDependencyError as error:
                if self._spec is None or self._packed:
                    raise
                self.backend, self._run = _choose_another(self.backend, error, self._spec, *self._options), None
        record_call(self.backend, time.perf_counter() - start)
        return out

    def _prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
        implementation = backends.get(self.backend)
        if isinstance(implementation, Preparing):
            return implementation.prepare(q, k, v, layout=self._layout, **self._arguments)
        return partial(implementation.run, layout=self._layout, **self._arguments)


def _choose_another(
    choice: str, error: MissingDependencyError, spec: AttentionSpec, policy: str, threshold: int
) -> str:
    """Return what serves instead of `choice`, with a warning; raise `error` when that is still what is chosen.

    A library may turn out not to build or load only when it is first used; its backend says so from then on, so that
    each further choice has one candidate less.
    """
    detect_hardware.cache_clear()
    second = select_backend(spec, policy, threshold).choice
    if second == choice:
        raise error
    warnings.warn(f"The backend {choice} failed, {second} serves instead. {error}", RuntimeWarning, stacklevel=3)
    return second


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
