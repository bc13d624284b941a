"""The KV cache: who holds which slots (`manager`, bookkeeping without tensors) and the tensors (`storage`).

The names below are imported when first used (PEP 562): the bookkeeping needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "ContiguousKVCacheManager": "vllm_teach.kvcache.manager",
    "Reservation": "vllm_teach.kvcache.manager",
    "KVStorage": "vllm_teach.kvcache.storage",
}

__all__ = ["ContiguousKVCacheManager", "KVStorage", "Reservation"]

if TYPE_CHECKING:
    from vllm_teach.kvcache.manager import ContiguousKVCacheManager, Reservation
    from vllm_teach.kvcache.storage import KVStorage


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
