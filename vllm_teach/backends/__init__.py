"""Attention implementations behind one signature, one file each.

A backend is a module with `name`, `unavailable()`, `supports(spec)` and `run(q, k, v, layout=…, causal=…, …)`; see
`spec.Backend`. It is imported when it is asked for, and its library when it is run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from vllm_teach.backends.spec import AttentionSpec, Backend

__all__ = ["AttentionSpec", "Backend", "availability", "get", "names"]

# From the one that is read to understand, to the ones that are used to go fast.
_MODULES = {
    "naive": "vllm_teach.backends.naive",
    "tiled": "vllm_teach.backends.tiled",
    "memory_efficient": "vllm_teach.backends.memory_efficient",
    "sdpa": "vllm_teach.backends.sdpa",
    "flex": "vllm_teach.backends.flex",
    "cpu": "vllm_teach.backends.cpu",
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
    if name not in _MODULES:
        raise InvalidArgumentError(f"There is no attention backend {name!r}; choose one of {', '.join(_MODULES)}.")
    return cast("Backend", import_module(_MODULES[name]))


def availability() -> dict[str, str | None]:
    """Return, for each backend, None when this machine can run it and otherwise the reason why not."""
    return {name: get(name).unavailable() for name in _MODULES}


def __getattr__(name: str) -> object:
    if name in ("AttentionSpec", "Backend"):
        return getattr(import_module("vllm_teach.backends.spec"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
