"""Every attention backend that can serve a call on this machine, timed in the same rounds."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Unpack

import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Layout
from vllm_teach.attention.variant import VariantArguments
from vllm_teach.backends import AttentionSpec
from vllm_teach.backends.hardware import detect_hardware
from vllm_teach.backends.selection import check_names, refusals
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.timing import Timing

# They compile for each size, for seconds, before the first call: a sweep over sizes would time little else.
COMPILE_PER_SIZE = frozenset({"flex"})


def measure_backends(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    names: Collection[str] | None = None,
    rounds: int = 5,
    layout: Layout | None = None,
    **arguments: Unpack[VariantArguments],
) -> dict[str, Timing]:
    """Time one call without gradients on each backend that can serve it here, and return the seconds by name.

    All run once in each round, after one call of each that builds and warms up, so the n-th samples of two backends
    belong together and their ratio is fair. `names` are the ones to time; by default all but those that compile for
    each size (`flex`, on a CPU). Those that cannot serve the call or run here are left out.

    Raises InvalidArgumentError for an unknown backend, when none is left, and for `rounds` below 1.
    """
    device = q.device.type
    with torch.no_grad():
        spec = AttentionSpec.of(q, k, v, layout=layout, **arguments)
        wanted = [name for name in backends.names() if device != "cpu" or name not in COMPILE_PER_SIZE]
        refused = refusals(spec, detect_hardware())
        able = [name for name in (wanted if names is None else check_names("names", names)) if name not in refused]
        if not able:
            raise InvalidArgumentError(f"names is {names!r}, and none of them can serve this call here; leave it out.")
        calls = {name: partial(backends.get(name).run, q, k, v, layout=layout, **arguments) for name in able}
        return race(calls, able[0], rounds=rounds, device=device).seconds
