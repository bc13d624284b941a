"""The mask that the kernels draw is that of attention.dropout, bit for bit, so that a backward pass elsewhere fits."""

import pytest
import torch

from vllm_teach.attention.dropout import keep_mask
from vllm_teach.attention.reference import naive_attention
from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
from vllm_teach.kernels.triton_kernels.problem import Lengths, Options
from vllm_teach.kernels.triton_kernels.tile_math import seed_halves


def mask_of_the_kernel(q_len: int, kv_len: int, options: Options) -> torch.Tensor:
    """All scores are 0 and v is the identity, so that out[i, j] is p / kv_len where the pair (i, j) is kept, else 0."""
    q = torch.zeros(2, q_len, 3, kv_len)
    v = torch.eye(kv_len)[None, :, None].expand(2, kv_len, 3, kv_len)
    out, lse = flash_attention(q, torch.zeros_like(v), v, options)
    torch.testing.assert_close(lse, torch.full_like(lse, kv_len).log())  # which dropout does not change
    return (out > 0).transpose(1, 2)  # [batch, heads, q_len, kv_len]


@pytest.mark.parametrize("seed", [0, 2**31, 2**32, 2**63 + 12345, 2**64 - 1])
def test_the_mask_is_bit_equal(seed):
    kept = mask_of_the_kernel(20, 40, Options(dropout_p=0.3, dropout_seed=seed))
    expected = keep_mask(seed, 0.3, torch.arange(6), (0, 20), (0, 40)).view(2, 3, 20, 40)
    assert torch.equal(kept, expected)
    assert 0.6 < kept.float().mean() < 0.8


def test_the_mask_does_not_depend_on_the_tile_or_the_layout():
    q, k, v = torch.randn(2, 40, 2, 16), torch.randn(2, 40, 1, 16), torch.randn(2, 40, 1, 16)
    options = Options(dropout_p=0.5, dropout_seed=7)
    dense, _ = flash_attention(q, k, v, options)
    starts = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat, _ = flash_attention(*(x.flatten(0, 1) for x in (q, k, v)), options, lengths=Lengths(starts, starts, 40, 40))
    assert torch.equal(dense.flatten(0, 1), flat)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_see_the_same_mask(causal, make_qkv, options_of, assert_by_the_rule):
    variant = {"dropout_p": 0.4, "dropout_seed": 2**64 - 5, "causal": causal}
    tensors = [x.requires_grad_() for x in make_qkv(20, 40)]
    out, _ = flash_attention(*tensors, options_of(**variant))
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, upstream)
    exact = torch.autograd.grad(naive_attention(*(x.double() for x in tensors), **variant), tensors, upstream.double())
    plain = torch.autograd.grad(naive_attention(*tensors, **variant), tensors, upstream)
    for grads in zip(found, plain, exact, strict=True):
        assert_by_the_rule(*grads, factor=3, slack=1e-4)


def test_seed_halves_are_the_seed_as_two_signed_numbers():
    for seed in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1):
        low, high = seed_halves(seed)
        assert -(2**31) <= low < 2**31
        assert -(2**31) <= high < 2**31
        assert low % 2**32 + (high % 2**32 << 32) == seed
