"""The forward kernel against the formula, with tiles so small that every length here has several."""

import pytest
import torch

from vllm_teach.attention.layout import Varlen
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.kernels.triton_kernels.flash_forward import flash_forward, flash_forward_spec
from vllm_teach.kernels.triton_kernels.flash_function import flash_attention
from vllm_teach.kernels.triton_kernels.problem import Lengths, Options, Problem
from vllm_teach.kernels.triton_kernels.tuning import Tile

VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "window (5, 3)": {"window_size": (5, 3)},
    "window (40, -1)": {"window_size": (40, -1)},
    "window (9, 0)": {"window_size": (9, 0)},
    "window (-1, 7)": {"window_size": (-1, 7)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.03])},
    "alibi of each sequence": {"alibi_slopes": torch.tensor([[0.5, 0.03], [0.1, 0.2]]), "causal": True},
    "scale": {"scale": -0.3},
}


@pytest.mark.parametrize("lengths", [(1, 1), (1, 37), (33, 50), (50, 20), (5, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_out_and_lse(variant, lengths, make_qkv, options_of, assert_by_the_rule):
    q, k, v = make_qkv(*lengths)
    out, lse = flash_forward(Problem.of(q, k, v, options_of(**variant)), Tile(16, 32))
    exact, exact_lse = naive_attention(q.double(), k.double(), v.double(), return_lse=True, **variant)
    assert_by_the_rule(out.view(q.shape), naive_attention(q, k, v, **variant), exact)
    lse = lse.view(2, 2, lengths[0]).transpose(0, 1)  # [q_heads, batch, q_len] -> [batch, q_heads, q_len]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [1, 16, 80, 129])
def test_head_sizes_in_float16(head_dim, make_qkv, assert_by_the_rule):
    q, k, v = make_qkv(20, 40, torch.float16, batch=1, head_dim=head_dim)
    out, _ = flash_attention(q, k, v, Options(right=0))
    exact = naive_attention(q.double(), k.double(), v.double(), causal=True)
    assert_by_the_rule(out, naive_attention(q, k, v, causal=True), exact)


def test_varlen_with_empty_sequences(assert_by_the_rule, options_of):
    q_lens, kv_lens = (3, 0, 40, 5), (20, 7, 35, 0)
    q, k, v = torch.randn(48, 2, 16), torch.randn(62, 1, 16), torch.randn(62, 1, 16)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, kv_lens))
    variant = {"causal": True, "window_size": (9, -1), "alibi_slopes": torch.rand(4, 2)}
    lengths = Lengths(cu_q, cu_k, max(q_lens), max(kv_lens))
    out, lse = flash_attention(q, k, v, options_of(**variant), lengths=lengths)
    layout = Varlen(cu_q, cu_k)
    exact = attend_sequences(naive_attention, q.double(), k.double(), v.double(), layout, **variant)
    assert_by_the_rule(out, attend_sequences(naive_attention, q, k, v, layout, **variant), exact)
    assert lse.shape == (2, 48)
    blind = torch.zeros(48, dtype=torch.bool)
    blind[3:8] = True  # sequence 2 has 5 queries more than keys, and the masks are aligned bottom-right
    blind[43:] = True  # the last sequence has no keys
    assert torch.equal(lse == -torch.inf, blind.expand(2, 48))


def test_tensors_may_be_views(make_qkv):
    packed = torch.randn(2, 30, 3, 4, 16)  # [batch, length, (q, k, v), heads, head_dim]
    views = [
        [packed[:, :, part] for part in range(3)],
        [torch.randn(2, 4, 30, 16).transpose(1, 2) for _ in range(3)],
        [torch.randn(2, 30, 16, 4).transpose(2, 3) for _ in range(3)],
        [torch.randn(2, 30, 4, 32)[..., ::2] for _ in range(3)],
    ]
    for q, k, v in views:
        out, _ = flash_attention(q, k, v, Options(right=0))
        copied, _ = flash_attention(*(x.contiguous() for x in (q, k, v)), Options(right=0))
        assert torch.equal(out, copied)
        torch.testing.assert_close(out, naive_attention(q, k, v, causal=True), rtol=0, atol=2e-6)


def test_every_tile_gives_the_same_answer(make_qkv):
    q, k, v = make_qkv(70, 90)
    expected = naive_attention(q, k, v, causal=True, window_size=(33, 0))
    for tile in (Tile(16, 16), Tile(16, 64), Tile(64, 16), Tile(128, 128)):
        out, _ = flash_forward(Problem.of(q, k, v, Options(left=33, right=0)), tile)
        torch.testing.assert_close(out.view(q.shape), expected, rtol=0, atol=2e-6)


def test_the_specification_beside_the_kernel_is_what_it_computes(make_qkv):
    q, k, v = make_qkv(20, 30, batch=1, heads=(1, 1))
    out, _ = flash_attention(q, k, v, Options(scale=0.2))
    expected = flash_forward_spec(q[0, :, 0], k[0, :, 0], v[0, :, 0], 0.2)
    torch.testing.assert_close(out[0, :, 0], expected, rtol=0, atol=1e-6)


def test_large_scores_do_not_overflow(make_qkv):
    q, k, v = make_qkv(20, 20)
    out, _ = flash_attention(q * 100, k * 100, v)
    assert out.isfinite().all()
    torch.testing.assert_close(out, naive_attention(q * 100, k * 100, v), rtol=0, atol=1e-4)


def test_what_is_hidden_in_other_tiles_may_be_nan(make_qkv):
    q, k, v = make_qkv(64, 64)
    expected, _ = flash_forward(Problem.of(q, k, v, Options(right=0)), Tile(32, 32))
    v[:, 32:] = torch.nan
    out, _ = flash_forward(Problem.of(q, k, v, Options(right=0)), Tile(32, 32))
    assert torch.equal(out.view(q.shape)[:, :32], expected.view(q.shape)[:, :32])
    assert out.view(q.shape)[:, 32:].isnan().all()


def test_softcap_keeps_small_scores_exact(make_qkv):
    """1 - 2 / (e^2x + 1) alone would lose most digits of a small score."""
    q, k, v = make_qkv(8, 8)
    _, lse = flash_attention(q * 1e-3, k * 1e-3, v, Options(softcap=1e3))
    _, exact = naive_attention(q.double() * 1e-3, k.double() * 1e-3, v.double(), return_lse=True, softcap=1e3)
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=1e-6)
