"""Attention as pure functions: the formula, the online softmax, and FlashAttention's tiled loop.

Tensors are `[batch, q_len or kv_len, heads, head_dim]`. Importing this room loads no torch; the names below are
imported when first used.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "naive_attention": "reference",
    "SoftmaxState": "online_softmax",
    "update": "online_softmax",
    "merge": "online_softmax",
    "finish": "online_softmax",
    "flash_attention_forward": "tiled",
    "choose_tile": "traffic",
    "naive_traffic": "traffic",
    "tiled_traffic": "traffic",
    "working_set_bytes": "traffic",
}

__all__ = [
    "SoftmaxState",
    "choose_tile",
    "finish",
    "flash_attention_forward",
    "merge",
    "naive_attention",
    "naive_traffic",
    "tiled_traffic",
    "update",
    "working_set_bytes",
]

if TYPE_CHECKING:
    from vllm_teach.attention.online_softmax import SoftmaxState, finish, merge, update
    from vllm_teach.attention.reference import naive_attention
    from vllm_teach.attention.tiled import flash_attention_forward
    from vllm_teach.attention.traffic import choose_tile, naive_traffic, tiled_traffic, working_set_bytes


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
