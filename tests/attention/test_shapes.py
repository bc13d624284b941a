import numpy as np
import pytest
import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.shapes import AttentionShape, check_qkv, check_scale
from vllm_teach.attention.tiled import flash_attention, flash_attention_forward
from vllm_teach.errors import InvalidArgumentError


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def test_the_sizes_are_read_from_the_tensors():
    shape = check_qkv(zeros(2, 5, 9, 64), zeros(2, 7, 3, 64), zeros(2, 7, 3, 64))
    assert shape == AttentionShape(batch=2, q_len=5, kv_len=7, q_heads=9, kv_heads=3, head_dim=64)
    assert shape.group == 3
    assert shape.causal_offset == 2


GOOD = zeros(2, 5, 4, 8)
BAD_CALLS = {
    "rank of q": (zeros(2, 5, 8), GOOD, GOOD, ["q has shape [2, 5, 8]"]),
    "rank of k": (GOOD, zeros(5, 8), GOOD, ["k has shape [5, 8]"]),
    "rank of v": (GOOD, GOOD, zeros(1, 2, 5, 4, 8), ["v has shape [1, 2, 5, 4, 8]"]),
    "integers": (GOOD.long(), GOOD.long(), GOOD.long(), ["q has dtype torch.int64"]),
    "v unlike k": (GOOD, GOOD, zeros(2, 6, 4, 8), ["v has shape [2, 6, 4, 8]", "k [2, 5, 4, 8]"]),
    "dtype of k": (GOOD, GOOD.half(), GOOD, ["k has dtype torch.float16", "q torch.float32"]),
    "dtype of v": (GOOD, GOOD, GOOD.half(), ["v has dtype torch.float16", "q torch.float32"]),
    "device": (GOOD, GOOD.to("meta"), GOOD.to("meta"), ["k is on meta", "q on cpu"]),
    "batch": (GOOD, zeros(3, 5, 4, 8), zeros(3, 5, 4, 8), ["k has shape [3, 5, 4, 8]", "q [2, 5, 4, 8]", "batch"]),
    "head_dim": (GOOD, zeros(2, 5, 4, 6), zeros(2, 5, 4, 6), ["k has shape [2, 5, 4, 6]", "6 and 8"]),
    "no head_dim": (zeros(2, 5, 4, 0), zeros(2, 5, 4, 0), zeros(2, 5, 4, 0), ["not 0"]),
    "heads": (GOOD, zeros(2, 5, 3, 8), zeros(2, 5, 3, 8), ["4 heads of q", "3 of k"]),
    "more kv heads": (GOOD, zeros(2, 5, 8, 8), zeros(2, 5, 8, 8), ["4 heads of q", "8 of k"]),
    "no kv heads": (GOOD, zeros(2, 5, 0, 8), zeros(2, 5, 0, 8), ["4 heads of q", "0 of k"]),
}


@pytest.mark.parametrize("attention", [check_qkv, naive_attention, flash_attention, flash_attention_forward])
@pytest.mark.parametrize("call", BAD_CALLS)
def test_tensors_that_do_not_fit_are_refused_by_name(attention, call):
    q, k, v, words = BAD_CALLS[call]
    with pytest.raises(InvalidArgumentError) as raised:
        attention(q, k, v)
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert message.count("\n") == 0


SIZES = {"batch": 2, "q_len": 5, "kv_len": 7, "q_heads": 9, "kv_heads": 3, "head_dim": 64}


@pytest.mark.parametrize(
    "change",
    [
        {"batch": -1},
        {"q_len": -5},
        {"kv_len": 1.5},
        {"q_heads": 0},
        {"kv_heads": True},
        {"head_dim": 0},
        {"q_heads": 8},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused_by_name(change):
    ((name, value),) = change.items()
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {value}; .*\\.$"):
        AttentionShape(**SIZES | change)


def test_a_shape_may_have_no_rows():
    assert AttentionShape(**SIZES | {"batch": 0, "q_len": 0, "kv_len": 0}).causal_offset == 0


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [[[1.0]], np.zeros((1, 2, 1, 4)), None, "x"])
@pytest.mark.parametrize("call", [naive_attention, flash_attention, flash_attention_forward])
def test_what_is_no_tensor_is_refused_by_name(call, name, value):
    tensors = {"q": torch.zeros(1, 2, 1, 4), "k": torch.zeros(1, 2, 1, 4), "v": torch.zeros(1, 2, 1, 4), name: value}
    with pytest.raises(InvalidArgumentError, match=f"^{name} is of type {type(value).__name__}; give a tensor"):
        call(**tensors)


@pytest.mark.parametrize("mask", ["x", [[True]], np.ones((2, 2), bool)])
def test_a_mask_that_is_no_tensor_is_refused(mask):
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(InvalidArgumentError, match=r"^mask is of type"):
        naive_attention(x, x, x, mask=mask)


def test_a_scale_may_be_any_real_number():
    assert check_scale(None, 16) == 0.25
    assert [check_scale(scale, 16) for scale in (0, -1.5, np.float32(0.5), np.int64(2))] == [0.0, -1.5, 0.5, 2.0]


@pytest.mark.parametrize("call", [naive_attention, flash_attention, flash_attention_forward])
def test_a_first_batch_below_0_is_refused(call):
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(InvalidArgumentError, match=r"^first_batch is -1; .*\.$"):
        call(x, x, x, first_batch=-1)
