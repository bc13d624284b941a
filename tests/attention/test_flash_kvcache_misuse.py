"""Misuse of flash_attn_with_kvcache is refused in one sentence, before anything is written to the cache."""

import math
from typing import Any

import pytest
import torch

from vllm_teach.attention.flash_kvcache import flash_attn_with_kvcache
from vllm_teach.errors import InvalidArgumentError


def misuse_arguments() -> dict[str, Any]:
    return {
        "q": torch.randn(2, 2, 4, 8),
        "k_cache": torch.randn(5, 6, 2, 8),
        "v_cache": torch.randn(5, 6, 2, 8),
        "k": torch.randn(2, 2, 2, 8),
        "v": torch.randn(2, 2, 2, 8),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        "rotary_cos": torch.randn(6, 4),
        "rotary_sin": torch.randn(6, 4),
        "causal": True,
    }


INT32 = torch.int32
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=INT32)
MISUSES: list[tuple[dict[str, Any], list[str]]] = [
    # Room: nothing fits beyond the cache, the table, or the blocks that are there.
    ({"cache_seqlens": torch.tensor([3, 5], dtype=INT32)}, ["cache_seqlens is 5", "sequence 1", "2 more", "6 keys"]),
    ({"cache_seqlens": 5}, ["cache_seqlens is 5", "6 keys"]),
    ({"cache_seqlens": torch.tensor([3, 11], dtype=INT32), "block_table": TABLE}, ["cache_seqlens is 11", "12 keys"]),
    ({"cache_seqlens": torch.tensor([3, -1], dtype=INT32)}, ["cache_seqlens holds -1"]),
    ({"cache_seqlens": -1}, ["cache_seqlens is -1"]),
    ({"cache_seqlens": True}, ["cache_seqlens is True"]),
    ({"cache_seqlens": torch.tensor([3, 4])}, ["cache_seqlens", "int64", "[2]"]),
    ({"cache_seqlens": torch.tensor([3], dtype=INT32)}, ["cache_seqlens", "[1]", "[2]"]),
    ({"cache_seqlens": None}, ["k is given without cache_seqlens"]),
    ({"block_table": torch.tensor([[0], [5]], dtype=INT32)}, ["block_table holds 5", "0 to 4"]),
    ({"block_table": torch.tensor([[0], [-1]], dtype=INT32)}, ["block_table holds -1"]),
    ({"block_table": torch.tensor([[0, 1]], dtype=INT32)}, ["block_table", "[1, 2]"]),
    ({"block_table": TABLE.long()}, ["block_table", "int64"]),
    ({"block_table": TABLE, "cache_batch_idx": torch.tensor([0, 1], dtype=INT32)}, ["cache_batch_idx", "block_table"]),
    ({"cache_batch_idx": torch.tensor([0, 5], dtype=INT32)}, ["cache_batch_idx holds 5", "0 to 4"]),
    ({"cache_batch_idx": [0, 1]}, ["cache_batch_idx", "list"]),
    ({"cache_leftpad": torch.tensor([0, 5], dtype=INT32)}, ["cache_leftpad holds 5", "0 to 4"]),
    ({"cache_leftpad": torch.tensor([0, -1], dtype=INT32)}, ["cache_leftpad holds -1"]),
    # Rotary tables.
    ({"rotary_sin": None}, ["rotary_cos and rotary_sin"]),
    ({"rotary_cos": torch.randn(5, 4), "rotary_sin": torch.randn(5, 4)}, ["rotary_cos", "[5, 4]", "position 5"]),
    ({"rotary_cos": torch.randn(6, 5), "rotary_sin": torch.randn(6, 5)}, ["rotary_cos", "at most head_dim, 8"]),
    ({"k": None, "v": None}, ["rotary_cos is given without k"]),
    # Tensors.
    ({"v": None}, ["v is None"]),
    ({"k": torch.randn(1, 2, 2, 8)}, ["k has shape [1, 2, 2, 8]", "[2, 2, 2, 8]"]),
    ({"v": torch.randn(2, 3, 2, 8)}, ["v has shape [2, 3, 2, 8]"]),
    ({"k": torch.randn(2, 2, 2, 8).half()}, ["k has dtype torch.float16", "torch.float32"]),
    ({"v_cache": torch.randn(5, 7, 2, 8)}, ["v_cache has shape [5, 7, 2, 8]"]),
    ({"v_cache": torch.randn(5, 6, 2, 8, device="meta")}, ["v_cache is on meta"]),
    ({"k_cache": torch.randn(5, 6, 3, 8), "v_cache": torch.randn(5, 6, 3, 8)}, ["k_cache [5, 6, 3, 8]", "multiple"]),
    ({"k_cache": torch.randn(1, 6, 2, 8), "v_cache": torch.randn(1, 6, 2, 8)}, ["2 sequences", "1 rows"]),
    ({"k_cache": torch.randn(1, 6, 2, 8).expand(5, -1, -1, -1)}, ["k_cache is expanded"]),
    ({"q": torch.randn(2, 2, 32)}, ["q has shape [2, 2, 32]"]),
    ({"q": "q"}, ["q is of type str"]),
    ({"q": torch.ones(2, 2, 4, 8, dtype=torch.int64)}, ["q has dtype torch.int64"]),
    ({"q": torch.randn(2, 2, 4, 8, requires_grad=True)}, ["q requires a gradient"]),
    ({"k": torch.randn(2, 2, 2, 8, requires_grad=True)}, ["k requires a gradient"]),
    ({"rotary_cos": torch.randn(6, 4, requires_grad=True)}, ["rotary_cos requires a gradient"]),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ["alibi_slopes requires a gradient"]),
    # The variant.
    ({"softmax_scale": math.nan}, ["softmax_scale is nan"]),
    ({"window_size": (1,)}, ["window_size"]),
    ({"softcap": -1.0}, ["softcap is -1.0"]),
    ({"alibi_slopes": torch.ones(3)}, ["alibi_slopes", "[3]"]),
    ({"causal": 1}, ["causal is 1"]),
    ({"num_splits": -1}, ["num_splits is -1"]),
]


def test_the_arguments_that_the_misuses_start_from_work():
    arguments = misuse_arguments()
    out = flash_attn_with_kvcache(**arguments)
    assert out.shape == arguments["q"].shape
    assert not out.isnan().any()


@pytest.mark.parametrize(("changes", "words"), MISUSES)
def test_misuse_is_refused_before_anything_is_written(changes, words):
    arguments = misuse_arguments() | changes
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(InvalidArgumentError) as raised:
        flash_attn_with_kvcache(**arguments)
    assert all(word in str(raised.value) for word in words), raised.value
    assert str(raised.value).endswith(".")
    for name, tensor in before.items():
        assert tensor.is_meta or torch.equal(arguments[name], tensor)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_tensors_that_require_gradients_may_be_used_where_none_are_recorded(num_splits):
    arguments = misuse_arguments() | {"alibi_slopes": torch.ones(4), "num_splits": num_splits}
    for name in ("q", "k_cache", "k", "alibi_slopes", "rotary_sin"):
        arguments[name].requires_grad_()
    with torch.no_grad():
        out = flash_attn_with_kvcache(**arguments)
    assert not out.requires_grad


@pytest.mark.parametrize("name", ["cache_seqlens", "cache_batch_idx", "cache_leftpad"])
def test_indices_without_numbers_are_refused(make_qkv, name):
    q, k, v = make_qkv()
    arguments = {"cache_seqlens": 3, name: torch.zeros(2, dtype=torch.int32, device="meta")}
    with pytest.raises(InvalidArgumentError, match=rf"^{name} is on meta, where tensors hold no numbers"):
        flash_attn_with_kvcache(q, k, v, **arguments)


def test_a_cache_made_under_inference_mode_is_written_only_there(make_qkv):
    q, new, _ = make_qkv(q_len=1, kv_len=1)
    with torch.inference_mode():
        k_cache, v_cache = torch.zeros(2, 6, 2, 8).double(), torch.zeros(2, 6, 2, 8).double()
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=0)
    assert flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=1).shape == q.shape
    with pytest.raises(InvalidArgumentError, match=r"^k_cache was made under torch.inference_mode"):
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=1)
    assert k_cache[:, 1].abs().max() == 0
