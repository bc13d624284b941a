"""The KV cache: who holds which slots (`manager`, bookkeeping without tensors) and the tensors (`storage`).

The names below are imported when first used (PEP 562): the bookkeeping needs no torch.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "ContiguousKVCacheManager": "manager",
    "Reservation": "manager",
    "KVStorage": "storage",
}

__all__ = ["ContiguousKVCacheManager", "KVStorage", "Reservation"]

if TYPE_CHECKING:
    from vllm_teach.kvcache.manager import ContiguousKVCacheManager, Reservation
    from vllm_teach.kvcache.storage import KVStorage


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
