import pytest
import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import sdpa


def test_pytorchs_own_causal_flag_is_aligned_top_left(make_qkv):
    """Why the adapter builds a mask: with fewer queries than keys, the flag answers another question."""
    q, k, v = make_qkv(3, 8)
    top_left = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    expected = naive_attention(q, k, v, causal=True)
    assert (top_left - expected).abs().max() > 0.1
    torch.testing.assert_close(sdpa.run(q, k, v, causal=True), expected, rtol=0, atol=1e-12)


def test_rows_that_see_no_key_are_zero(make_qkv):
    q, k, v = make_qkv(8, 3)
    out = sdpa.run(q, k, v, causal=True)
    assert (out[:, :5] == 0).all()
    assert out[:, 5:].abs().min() > 0


@pytest.mark.parametrize(("q_len", "kv_len", "masked"), [(1, 9, False), (9, 9, False), (2, 9, True), (9, 4, False)])
def test_a_mask_is_built_only_where_it_is_needed(make_qkv, monkeypatch, q_len, kv_len, masked):
    calls = []
    original = sdpa.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    sdpa.run(*make_qkv(q_len, kv_len), causal=True)
    assert len(calls) == 1
    assert (calls[0]["attn_mask"] is not None) == masked
