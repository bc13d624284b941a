"""Attention as pure functions: the formula, FlashAttention's and xFormers' algorithms, and their interfaces.

Tensors are `[batch, q_len or kv_len, heads, head_dim]`; `patterns` says which keys a query may see, `attn_bias` has
xFormers' masks. Importing this room loads no torch; the names below are imported when first used.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "naive_attention": "reference",
    "SoftmaxState": "online_softmax",
    "update": "online_softmax",
    "merge": "online_softmax",
    "finish": "online_softmax",
    "flash_attention": "tiled",
    "flash_attention_forward": "tiled",
    "flash_attention_backward": "tiled_backward",
    "attend_sequences": "sequencewise",
    "Paged": "layout",
    "Varlen": "layout",
    "memory_efficient_attention": "memory_efficient",
    "memory_efficient_attention_forward": "memory_efficient",
    "memory_efficient_attention_forward_requires_grad": "memory_efficient",
    "memory_efficient_attention_partial": "memory_efficient",
    "chunked_attention": "chunked",
    "flash_attn_func": "flash_interface",
    "flash_attn_kvpacked_func": "flash_interface",
    "flash_attn_qkvpacked_func": "flash_interface",
    "flash_attn_varlen_func": "flash_interface",
    "flash_attn_with_kvcache": "flash_kvcache",
    "FlashAttention": "flash_module",
    "choose_num_splits": "split_kv",
    "merge_attention": "split_kv",
    "split_kv_attention": "split_kv",
    "apply_rotary": "rotary",
    "choose_tile": "traffic",
    "naive_traffic": "traffic",
    "tiled_traffic": "traffic",
    "working_set_bytes": "traffic",
    "backward_working_set_bytes": "backward_traffic",
    "choose_backward_tile": "backward_traffic",
    "naive_backward_traffic": "backward_traffic",
    "naive_saved_bytes": "backward_traffic",
    "tiled_backward_traffic": "backward_traffic",
    "tiled_saved_bytes": "backward_traffic",
}

__all__ = [
    "FlashAttention",
    "Paged",
    "SoftmaxState",
    "Varlen",
    "apply_rotary",
    "attend_sequences",
    "backward_working_set_bytes",
    "choose_backward_tile",
    "choose_num_splits",
    "choose_tile",
    "chunked_attention",
    "finish",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge",
    "merge_attention",
    "naive_attention",
    "naive_backward_traffic",
    "naive_saved_bytes",
    "naive_traffic",
    "split_kv_attention",
    "tiled_backward_traffic",
    "tiled_saved_bytes",
    "tiled_traffic",
    "update",
    "working_set_bytes",
]

if TYPE_CHECKING:
    from vllm_teach.attention.backward_traffic import (
        backward_working_set_bytes,
        choose_backward_tile,
        naive_backward_traffic,
        naive_saved_bytes,
        tiled_backward_traffic,
        tiled_saved_bytes,
    )
    from vllm_teach.attention.chunked import chunked_attention
    from vllm_teach.attention.flash_interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
    )
    from vllm_teach.attention.flash_kvcache import flash_attn_with_kvcache
    from vllm_teach.attention.flash_module import FlashAttention
    from vllm_teach.attention.layout import Paged, Varlen
    from vllm_teach.attention.memory_efficient import (
        memory_efficient_attention,
        memory_efficient_attention_forward,
        memory_efficient_attention_forward_requires_grad,
        memory_efficient_attention_partial,
    )
    from vllm_teach.attention.online_softmax import SoftmaxState, finish, merge, update
    from vllm_teach.attention.reference import naive_attention
    from vllm_teach.attention.rotary import apply_rotary
    from vllm_teach.attention.sequencewise import attend_sequences
    from vllm_teach.attention.split_kv import choose_num_splits, merge_attention, split_kv_attention
    from vllm_teach.attention.tiled import flash_attention, flash_attention_forward
    from vllm_teach.attention.tiled_backward import flash_attention_backward
    from vllm_teach.attention.traffic import choose_tile, naive_traffic, tiled_traffic, working_set_bytes


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
