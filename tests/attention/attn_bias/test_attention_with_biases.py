"""memory_efficient_attention with each bias, against the naive one with the bias written out, gradients too."""

import math
from collections.abc import Callable

import pytest
import torch

from vllm_teach import counters
from vllm_teach.attention import attn_bias as ab
from vllm_teach.attention.memory_efficient import memory_efficient_attention
from vllm_teach.attention.reference import naive_attention
from vllm_teach.errors import InvalidArgumentError

Make = Callable[[], ab.AttentionBias]

WHOLE: dict[str, Make] = {
    "top-left": ab.LowerTriangularMask,
    "bottom-right": ab.LowerTriangularFromBottomRightMask,
    "bottom-right, window 4": lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(4),
    "local (3, 2)": lambda: ab.LocalAttentionFromBottomRightMask(window_left=3, window_right=2),
}
Q_LENS, KV_LENS, PADDING = [3, 0, 70, 1, 5], [4, 2, 75, 9, 5], 80
PAGE = 16
TABLES = torch.tensor([[7, 0, 0, 0, 0], [3, 0, 0, 0, 0], [9, 1, 4, 2, 11], [5, 0, 0, 0, 0], [10, 0, 0, 0, 0]]).int()
SLOTS = 12 * PAGE
BEHIND: dict[str, Make] = {
    "full": lambda: ab.BlockDiagonalMask.from_seqlens(Q_LENS, KV_LENS),
    "top-left": lambda: ab.BlockDiagonalCausalMask.from_seqlens(Q_LENS, KV_LENS),
    "bottom-right": lambda: ab.BlockDiagonalCausalFromBottomRightMask.from_seqlens(Q_LENS, KV_LENS),
    "top-left, window 6": lambda: ab.BlockDiagonalMask.from_seqlens(Q_LENS, KV_LENS).make_local_attention(6),
    "bottom-right, window 6": lambda: ab.BlockDiagonalMask.from_seqlens(
        Q_LENS, KV_LENS
    ).make_local_attention_from_bottomright(6),
}
PADDED: dict[str, Make] = {
    "full": lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens(Q_LENS, PADDING, KV_LENS),
    "bottom-right": lambda: ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q_LENS, PADDING, KV_LENS),
    "window 6": lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
        Q_LENS, PADDING, KV_LENS, 6
    ),
    "local (3, 2)": lambda: ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
        Q_LENS, PADDING, KV_LENS, 3, 2
    ),
}
PAGED: dict[str, Make] = {
    "full": lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q_LENS, KV_LENS, TABLES, PAGE),
    "bottom-right": lambda: ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        Q_LENS, KV_LENS, TABLES, PAGE
    ),
}


def cases(makers: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", list(makers.values()), ids=list(makers))


def draw(batch: int, q_len: int, kv_len: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(batch, n, 2, 8, dtype=dtype) for n in (q_len, kv_len, kv_len)]


def assert_equals_naive(bias: ab.AttentionBias, qkv: list[torch.Tensor]) -> None:
    """Output and gradients in float64, with the bias and with what it materialises to."""
    mask = bias.materialize((1, 1, qkv[0].shape[1], qkv[1].shape[1])) == 0
    ours, theirs = ([t.detach().requires_grad_() for t in qkv] for _ in range(2))
    out, expected = memory_efficient_attention(*ours, attn_bias=bias), naive_attention(*theirs, mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    dout = torch.randn_like(out)
    grads, expected_grads = torch.autograd.grad(out, ours, dout), torch.autograd.grad(expected, theirs, dout)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-10, rtol=0)


@cases(WHOLE)
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (3, 9), (9, 3), (0, 4), (4, 0), (300, 290)])
def test_biases_of_the_whole_matrix(make: Make, q_len: int, kv_len: int) -> None:
    assert_equals_naive(make(), draw(2, q_len, kv_len))


@cases(BEHIND)
def test_sequences_behind_one_another(make: Make) -> None:
    assert_equals_naive(make(), draw(1, sum(Q_LENS), sum(KV_LENS)))


@cases(PADDED)
def test_sequences_in_rooms_of_equal_size(make: Make) -> None:
    assert_equals_naive(make(), draw(1, sum(Q_LENS), PADDING * len(KV_LENS)))


@cases(PAGED)
def test_sequences_in_pages(make: Make) -> None:
    assert_equals_naive(make(), draw(1, sum(Q_LENS), SLOTS))


def test_more_queries_than_keys_top_left_all_see_a_key_and_bottom_right_not() -> None:
    q, k, v = draw(1, 9, 3)
    top = memory_efficient_attention(q, k, v, ab.LowerTriangularMask())
    bottom = memory_efficient_attention(q, k, v, ab.LowerTriangularFromBottomRightMask())
    torch.testing.assert_close(top[:, 0], v[:, 0])
    torch.testing.assert_close(bottom[:, 6], v[:, 0])
    assert (bottom[:, :6] == 0).all()


def test_a_tensor_bias_below_the_diagonal_and_its_gradient() -> None:
    q, k, v = draw(2, 7, 9)
    tensors = [torch.randn(2, 2, 7, 9).double().requires_grad_() for _ in range(2)]
    tensors[1].data.copy_(tensors[0])
    out = memory_efficient_attention(q, k, v, ab.LowerTriangularMask().add_bias(tensors[0]))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8) + tensors[1]
    scores = scores.masked_fill(~torch.ones(7, 9, dtype=torch.bool).tril(), -math.inf)
    expected = torch.einsum("bhij,bjhd->bihd", torch.softmax(scores, dim=-1), v)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(x, t, dout)[0] for x, t in zip((out, expected), tensors, strict=True)]
    torch.testing.assert_close(*grads, atol=1e-10, rtol=0)
    assert (grads[0].triu(1) == 0).all()


def assert_ignores_unused_slots(bias: ab.AttentionBias, full: ab.AttentionBias, slots: int) -> None:
    q, k, v = draw(1, sum(Q_LENS), slots)
    unused = (full.materialize((sum(Q_LENS), slots)) == -math.inf).all(dim=0)
    assert unused.sum() >= 30
    clean = memory_efficient_attention(q, k, v, bias)
    k[:, unused], v[:, unused] = math.nan, math.nan
    assert torch.equal(memory_efficient_attention(q, k, v, bias), clean)


@cases(PADDED)
def test_padding_may_hold_nan(make: Make) -> None:
    assert_ignores_unused_slots(make(), PADDED["full"](), PADDING * len(KV_LENS))


@cases(PAGED)
def test_pages_may_hold_nan_behind_the_last_key(make: Make) -> None:
    assert_ignores_unused_slots(make(), PAGED["full"](), SLOTS)


def test_a_window_counts_as_in_xformers_and_not_as_in_flash_attention() -> None:
    """A window of 1 shows a query its own key alone, so the output is v."""
    q, k, v = draw(1, 6, 6)
    torch.testing.assert_close(
        memory_efficient_attention(q, k, v, ab.LowerTriangularFromBottomRightLocalAttentionMask(1)), v
    )
    two = memory_efficient_attention(q, k, v, ab.LowerTriangularFromBottomRightLocalAttentionMask(2))
    torch.testing.assert_close(two, naive_attention(q, k, v, causal=True, window_size=(1, 0)))


def test_no_sequence_pays_for_the_others() -> None:
    q, k, v = draw(1, 400, 400)
    bias = ab.BlockDiagonalMask.from_seqlens([100] * 4)
    with counters.count() as tally:
        memory_efficient_attention(q, k, v, bias)
    assert tally.flops == 4 * (2 * 2 * 2 * 100 * 100 * 8)  # two products, two heads: a quarter of 400 * 400
    v_other = v.clone()
    v_other[:, 100:] = math.nan  # 0 * NaN is NaN: a masked key would show
    assert torch.equal(
        memory_efficient_attention(q, k, v, bias)[:, :100], memory_efficient_attention(q, k, v_other, bias)[:, :100]
    )


def test_dropout_takes_each_sequence_by_its_number() -> None:
    q, k, v = (t.reshape(3, 20, 2, 8) for t in draw(1, 60, 60))
    torch.manual_seed(5)
    batched = memory_efficient_attention(q, k, v, p=0.4)
    torch.manual_seed(5)
    flat = (t.reshape(1, 60, 2, 8) for t in (q, k, v))
    behind = memory_efficient_attention(*flat, ab.BlockDiagonalMask.from_seqlens([20] * 3), p=0.4)
    torch.testing.assert_close(behind.reshape(3, 20, 2, 8), batched, atol=1e-12, rtol=0)


def test_groups_of_heads_in_pages() -> None:
    q = torch.randn(1, sum(Q_LENS), 2, 3, 8, dtype=torch.float64)
    k, v = (torch.randn(1, SLOTS, 2, 1, 8, dtype=torch.float64).expand(-1, -1, -1, 3, -1) for _ in range(2))
    bias = PAGED["bottom-right"]()
    out = memory_efficient_attention(q, k, v, bias)
    mask = bias.materialize((1, 1, sum(Q_LENS), SLOTS)) == 0
    expected = naive_attention(q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0], mask=mask)
    torch.testing.assert_close(out.flatten(2, 3), expected, atol=1e-10, rtol=0)


def test_no_sequences_at_all() -> None:
    q, k, v = (t.requires_grad_() for t in draw(1, 0, 0))
    out = memory_efficient_attention(q, k, v, ab.BlockDiagonalMask.from_seqlens([]))
    assert out.shape == (1, 0, 2, 8)
    out.sum().backward()


@pytest.mark.parametrize(
    ("bias", "sizes", "message"),
    [
        (BEHIND["full"](), (2, 79, 95), "query has batch size 2 and attn_bias is a BlockDiagonalMask;"),
        (BEHIND["full"](), (1, 78, 95), "query has 78 tokens and attn_bias, a BlockDiagonalMask, divides 79 "),
        (BEHIND["full"](), (1, 79, 96), "key has 96 tokens and attn_bias, a BlockDiagonalMask, divides 95 "),
        (PADDED["full"](), (1, 79, 95), "key has 95 tokens .* divides 400 "),
        (PAGED["full"](), (1, 79, SLOTS + 1), "key has 193 tokens; give whole pages of 16."),
        (PAGED["full"](), (1, 79, SLOTS - PAGE), "block_tables holds 11; key has the pages 0 to 10."),
        (
            ab.LowerTriangularMaskWithTensorBias(torch.zeros(1, 2, 7, 9)),
            (1, 7, 8),
            r"attn_bias has shape \[1, 2, 7, 9\] and the scores it is added to \[1, 2, 7, 8\];",
        ),
    ],
)
def test_a_bias_for_other_sizes_is_refused(bias: ab.AttentionBias, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        memory_efficient_attention(*draw(*sizes), attn_bias=bias)
