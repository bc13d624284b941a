"""The KV cache: whose tokens lie in which blocks (`manager`, bookkeeping without tensors), and the tensors (`storage`).

The names below are imported when first used (PEP 562): the bookkeeping needs no torch.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "BlockPool": "block_pool",
    "BlockTable": "block_table",
    "BuddyAllocator": "buddy",
    "ContiguousKVCacheManager": "reservation",
    "HashPrefixCache": "hash_prefix_cache",
    "KVCacheManager": "manager",
    "KVStorage": "storage",
    "QuantizedKVStorage": "quantized_storage",
    "RadixPrefixCache": "radix_prefix_cache",
    "Transfer": "transfers",
}

__all__ = [
    "BlockPool",
    "BlockTable",
    "BuddyAllocator",
    "ContiguousKVCacheManager",
    "HashPrefixCache",
    "KVCacheManager",
    "KVStorage",
    "QuantizedKVStorage",
    "RadixPrefixCache",
    "Transfer",
]

if TYPE_CHECKING:
    from vllm_teach.kvcache.block_pool import BlockPool
    from vllm_teach.kvcache.block_table import BlockTable
    from vllm_teach.kvcache.buddy import BuddyAllocator
    from vllm_teach.kvcache.hash_prefix_cache import HashPrefixCache
    from vllm_teach.kvcache.manager import KVCacheManager
    from vllm_teach.kvcache.quantized_storage import QuantizedKVStorage
    from vllm_teach.kvcache.radix_prefix_cache import RadixPrefixCache
    from vllm_teach.kvcache.reservation import ContiguousKVCacheManager
    from vllm_teach.kvcache.storage import KVStorage
    from vllm_teach.kvcache.transfers import Transfer


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
