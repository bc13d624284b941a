"""The prefix caches by name."""

from __future__ import annotations

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.hash_prefix_cache import HashPrefixCache
from vllm_teach.kvcache.prefix_cache import PrefixCache
from vllm_teach.kvcache.radix_prefix_cache import RadixPrefixCache

PREFIX_CACHES: dict[str, type[PrefixCache]] = {"hash": HashPrefixCache, "radix": RadixPrefixCache}


def make_prefix_cache(name: str | None, pool: BlockPool, block_size: int, eviction: str = "lru") -> PrefixCache | None:
    """Return the prefix cache called `name` over `pool`, whose `on_idle` it takes, or None for None.

    Raises InvalidArgumentError for a name or an eviction policy that is not known.
    """
    if name is None:
        return None
    if name not in PREFIX_CACHES:
        raise InvalidArgumentError(
            f"prefix_cache={name!r} is not known: choose one of {tuple(PREFIX_CACHES)}, or None for no sharing."
        )
    return PREFIX_CACHES[name](pool, block_size, eviction)
