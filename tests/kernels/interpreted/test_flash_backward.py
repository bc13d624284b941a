"""The backward kernels against autograd through the formula."""

import pytest
import torch

from vllm_teach.attention.layout import Varlen
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.kernels.triton_kernels.backward_math import flash_backward_spec
from vllm_teach.kernels.triton_kernels.flash_backward import flash_backward
from vllm_teach.kernels.triton_kernels.flash_forward import flash_forward
from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
from vllm_teach.kernels.triton_kernels.problem import Lengths, Options, Problem
from vllm_teach.kernels.triton_kernels.tuning import Tile

VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "window (9, 3)": {"window_size": (9, 3)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.03]), "scale": 0.4},
}


def gradients(attend, tensors, upstream):
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(attend(*leaves), leaves, upstream)


def assert_gradients(found, plain, exact, assert_by_the_rule):
    for grads in zip(found, plain, exact, strict=True):
        assert_by_the_rule(*grads, factor=3, slack=1e-4 * grads[2].abs().max().item() if grads[2].numel() else 0)


@pytest.mark.parametrize("lengths", [(1, 37), (33, 50), (50, 20)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_gradients(variant, lengths, make_qkv, options_of, assert_by_the_rule):
    q, k, v = make_qkv(*lengths)
    upstream = torch.randn_like(q)
    problem = Problem.of(q, k, v, options_of(**variant))
    out, lse = flash_forward(problem)
    flat = flash_backward(problem, out, lse, upstream.flatten(0, 1), Tile(32, 16), Tile(16, 32))
    found = [grad.view(x.shape) for grad, x in zip(flat, (q, k, v), strict=True)]
    plain = gradients(lambda *x: naive_attention(*x, **variant), (q, k, v), upstream)
    doubles = [x.double() for x in (q, k, v)]
    exact = gradients(lambda *x: naive_attention(*x, **variant), doubles, upstream.double())
    assert_gradients(found, plain, exact, assert_by_the_rule)


def test_grouped_heads_in_float16(make_qkv, assert_by_the_rule):
    q, k, v = make_qkv(20, 30, torch.float16, batch=1, heads=(6, 2), head_dim=40)
    upstream = torch.randn_like(q)
    found = gradients(lambda *x: flash_attention(*x, Options(right=0))[0], (q, k, v), upstream)
    plain = gradients(lambda *x: naive_attention(*x, causal=True), (q, k, v), upstream)
    doubles = [x.double() for x in (q, k, v)]
    exact = gradients(lambda *x: naive_attention(*x, causal=True), doubles, upstream.double())
    assert_gradients(found, plain, exact, assert_by_the_rule)


def test_varlen_with_empty_sequences(assert_by_the_rule):
    q_lens, kv_lens = (3, 0, 40, 5), (20, 7, 35, 0)
    tensors = [torch.randn(48, 2, 16), torch.randn(62, 1, 16), torch.randn(62, 1, 16)]
    upstream = torch.randn(48, 2, 16)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, kv_lens))
    lengths = Lengths(cu_q, cu_k, 40, 35)
    found = gradients(lambda *x: flash_attention(*x, Options(right=0), lengths=lengths)[0], tensors, upstream)

    def naive(*x):
        return attend_sequences(naive_attention, *x, Varlen(cu_q, cu_k), causal=True)

    exact = gradients(naive, [x.double() for x in tensors], upstream.double())
    assert_gradients(found, gradients(naive, tensors, upstream), exact, assert_by_the_rule)
    assert (found[0][43:] == 0).all()  # its queries see no key
    assert (found[1][20:27] == 0).all()  # its keys are seen by no query


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_to_attend_to_gives_no_gradient(lengths, make_qkv):
    tensors = make_qkv(*lengths)
    found = gradients(lambda *x: flash_attention(*x)[0], tensors, torch.randn_like(tensors[0]))
    for grad, x in zip(found, tensors, strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


def test_the_same_input_gives_the_same_bits(make_qkv):
    q, k, v = make_qkv(40, 40, heads=(4, 1))
    upstream = torch.randn_like(q)
    first, second = (gradients(lambda *x: flash_attention(*x)[0], (q, k, v), upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_upstream_gradient_that_is_no_contiguous_tensor(make_qkv):
    leaves = [x.requires_grad_() for x in make_qkv(10, 12)]
    flash_attention(*leaves)[0].sum().backward()  # whose gradient is one number, expanded
    grads = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    naive_attention(*leaves).sum().backward()
    for grad, x in zip(grads, leaves, strict=True):
        torch.testing.assert_close(grad, x.grad, rtol=0, atol=1e-5)


def test_a_negation_that_is_put_off_counts(make_qkv):
    """A gradient that comes through a conjugation may be one."""
    q, k, v = make_qkv(5, 6)
    upstream = torch.randn_like(q)
    put_off, done = (
        gradients(lambda *x: flash_attention(*x)[0], (q, k, v), each) for each in (torch._neg_view(upstream), -upstream)
    )
    assert all(torch.equal(mine, other) for mine, other in zip(put_off, done, strict=True))


def test_a_tensor_changed_in_between_is_noticed(make_qkv):
    q, k, v = make_qkv(10, 12)
    q.requires_grad_()
    out, lse = flash_attention(q, k, v)
    assert not lse.requires_grad
    v += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_specification_beside_the_kernels_is_what_they_compute(make_qkv):
    q, k, v = make_qkv(20, 30, batch=1, heads=(1, 1))
    upstream = torch.randn_like(q)
    out, _ = flash_attention(q, k, v, Options(scale=0.2))
    found = gradients(lambda *x: flash_attention(*x, Options(scale=0.2))[0], (q, k, v), upstream)
    expected = flash_backward_spec(*(x[0, :, 0] for x in (q, k, v, out, upstream)), 0.2)
    for grad, spec in zip(found, expected, strict=True):
        torch.testing.assert_close(grad[0, :, 0], spec, rtol=0, atol=2e-6)
