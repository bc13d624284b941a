"""Attention implementations behind one signature, one file each.

A backend is a module with `name`, `unavailable()`, `supports(spec)` and `run(q, k, v, layout=…, causal=…, …)`; see
`spec.Backend`. It is imported when it is asked for, and its library when it is run.

- A call: `spec` (what it asks for), `dispatch.attend` (select, run, count), `call` (the check that starts every `run`),
  `counts`.
- The choice: `selection` (by `hardware` and the order in `preference`), `explanation` (the choice as a table).
- The policy "measured": `tuning_file` (where `vllm-teach tune` keeps its timings), `measured` (how they are read). The
  sweep itself, and how good the choices are, is `performance.tuning` and `performance.audit`.
- An INT8 cache: `packed` (who reads its codes as they lie).
- For who writes a backend: `bands` (masks that libraries know by two numbers), `library` (imports a GPU package),
  `conformance` (the table that each must pass).
"""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from vllm_teach import lazy
from vllm_teach.errors import InvalidArgumentError

_HOMES = {
    "AttentionSpec": "spec",
    "Backend": "spec",
    "Calls": "counts",
    "Hardware": "hardware",
    "Selection": "selection",
    "attend": "dispatch",
    "calls": "counts",
    "detect_hardware": "hardware",
    "explain": "selection",
    "reset_calls": "counts",
    "select_backend": "selection",
}

__all__ = [
    "AttentionSpec",
    "Backend",
    "Calls",
    "Hardware",
    "Selection",
    "attend",
    "availability",
    "calls",
    "detect_hardware",
    "explain",
    "get",
    "names",
    "reset_calls",
    "select_backend",
]

if TYPE_CHECKING:
    from vllm_teach.backends.counts import Calls, calls, reset_calls
    from vllm_teach.backends.dispatch import attend
    from vllm_teach.backends.hardware import Hardware, detect_hardware
    from vllm_teach.backends.selection import Selection, explain, select_backend
    from vllm_teach.backends.spec import AttentionSpec, Backend

# From the one that is read to understand, to the ones that are used to go fast.
_MODULES = {
    "naive": "vllm_teach.backends.naive",
    "tiled": "vllm_teach.backends.tiled",
    "memory_efficient": "vllm_teach.backends.memory_efficient",
    "sdpa": "vllm_teach.backends.sdpa",
    "flex": "vllm_teach.backends.flex",
    "cpu": "vllm_teach.backends.cpu",
    "triton": "vllm_teach.backends.triton_backend",
    "flash_attn": "vllm_teach.backends.flash_attn",
    "xformers": "vllm_teach.backends.xformers",
}


def names() -> list[str]:
    """Return the names of all backends, whether or not this machine can run them."""
    return list(_MODULES)


def get(name: str) -> "Backend":
    """Return the backend called `name`.

    Raises InvalidArgumentError when there is none of that name.
    """
    if not isinstance(name, str) or name not in _MODULES:
        raise InvalidArgumentError(f"There is no attention backend {name!r}; choose one of {', '.join(_MODULES)}.")
    return cast("Backend", import_module(_MODULES[name]))


def availability() -> dict[str, str | None]:
    """Return, for each backend, None when this machine can run it and otherwise the reason why not."""
    return {name: get(name).unavailable() for name in _MODULES}


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
