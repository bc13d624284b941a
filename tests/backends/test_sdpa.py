import pytest
import torch

from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import sdpa
from vllm_teach.backends.spec import AttentionSpec


def test_pytorchs_own_causal_flag_is_aligned_top_left(make_qkv) -> None:
    """Why the adapter builds a mask: with fewer queries than keys, the flag answers another question."""
    q, k, v = make_qkv(3, 8)
    top_left = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    expected = naive_attention(q, k, v, causal=True)
    assert (top_left - expected).abs().max() > 0.1
    torch.testing.assert_close(sdpa.run(q, k, v, causal=True), expected, rtol=0, atol=1e-12)


def test_pytorch_makes_nan_of_a_causal_mask_with_a_negative_scale_on_a_cpu(make_qkv) -> None:
    """Why the adapter moves the sign into q: the kernel masks first and scales afterwards. Scale 0 is like it."""
    q, k, v = make_qkv(40, 40, dtype=torch.float32)
    for scale in (-0.2, 0.0):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
        )
        assert theirs.isnan().any()
        expected = naive_attention(q, k, v, causal=True, scale=scale)
        torch.testing.assert_close(sdpa.run(q, k, v, causal=True, scale=scale), expected, rtol=0, atol=1e-5)


def test_rows_that_see_no_key_are_zero(make_qkv) -> None:
    q, k, v = make_qkv(8, 3)
    out = sdpa.run(q, k, v, causal=True)
    assert (out[:, :5] == 0).all()
    assert out[:, 5:].abs().min() > 0


def test_rows_that_see_no_key_give_no_gradient(make_qkv) -> None:
    q, k, v = make_qkv(8, 8)
    q.requires_grad_()
    sdpa.run(q, k, v, pattern=~LocalWindow(-1, 0)).sum().backward()  # the last query sees nothing
    assert q.grad is not None
    assert (q.grad[:, -1] == 0).all()
    assert q.grad[:, :-1].isfinite().all()


MASKED = [
    ({"causal": True}, 1, 9, False),
    ({"causal": True}, 9, 9, False),
    ({"causal": True}, 2, 9, True),
    ({"causal": True}, 9, 4, False),
    ({}, 2, 9, False),
    ({"window_size": (20, 0)}, 9, 9, False),  # hides no more than the causal mask
    ({"window_size": (3, 0)}, 9, 9, True),
    ({"window_size": (3, 0)}, 1, 9, True),
    ({"pattern": Causal() & GlobalTokens(2)}, 9, 9, True),
    ({"alibi_slopes": torch.rand(2)}, 9, 9, True),
]


@pytest.mark.parametrize(("arguments", "q_len", "kv_len", "masked"), MASKED, ids=str)
def test_a_mask_is_built_only_where_it_is_needed(make_qkv, monkeypatch, arguments, q_len, kv_len, masked) -> None:
    calls = []
    original = sdpa.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    q, k, v = make_qkv(q_len, kv_len)
    out = sdpa.run(q, k, v, **arguments)
    torch.testing.assert_close(out, naive_attention(q, k, v, **arguments), rtol=0, atol=1e-7)
    assert len(calls) == 1
    assert (calls[0]["attn_mask"] is not None) == masked


@pytest.mark.parametrize(("arguments", "q_len", "kv_len", "masked"), MASKED, ids=str)
def test_what_costs_a_mask_is_said(make_qkv, arguments, q_len, kv_len, masked) -> None:
    spec = AttentionSpec.of(*make_qkv(q_len, kv_len), **arguments)
    dense_causal = arguments == {"causal": True} and (q_len, kv_len) == (
        2,
        9,
    )  # on a CPU; a CUDA kernel has it built in
    assert sdpa.needs_dense_mask(spec) == (masked and not dense_causal)
