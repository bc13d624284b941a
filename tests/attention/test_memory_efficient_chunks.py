"""The chunked algorithm itself, below xFormers' interface: against the formula, by every chunking, and its memory."""

import math
import random
from itertools import permutations
from typing import Any

import pytest
import torch

from vllm_teach import counters
from vllm_teach.attention.chunk_summaries import merge_all
from vllm_teach.attention.chunked import chunked_attention, default_k_chunk
from vllm_teach.attention.online_softmax import SoftmaxState, finish, merge
from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant
from vllm_teach.errors import InvalidArgumentError

Case = dict[str, Any]


def random_case(seed: int) -> tuple[list[torch.Tensor], Case, Case]:
    """Return (q, k, v), the arguments of the variant, and the chunk sizes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, (q_heads, kv_heads), head_dim = rng.choice([1, 2]), rng.choice([(1, 1), (4, 2), (6, 2)]), rng.choice([4, 16])
    q_len, kv_len = (rng.choice([0, 1, 7, 20, 33, 40, 48, 50]) for _ in range(2))
    sizes = [(q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads)]
    qkv = [torch.randn(batch, n, h, head_dim, dtype=torch.float64, generator=generator) for n, h in sizes]
    choices: Case = {
        "causal": True,
        "window_size": (rng.randint(-1, 9), rng.randint(-1, 9)),
        "pattern": rng.choice([GlobalTokens(2) | LocalWindow(5, 0), BlockSparsePattern([[1, 0], [1, 1]], 25)]),
        "softcap": 1.5,
        "alibi_slopes": torch.rand(rng.choice([(q_heads,), (batch, q_heads)]), generator=generator),
        "dropout_p": 0.3,
        "scale": 0.7,
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.35}
    if "dropout_p" in chosen:
        chosen["dropout_seed"] = rng.randrange(2**64)
    return qkv, chosen, {"q_chunk": rng.choice([None, 7, 8, 16]), "k_chunk": rng.choice([None, 1, 8, 16])}


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; both must be -inf in the same places, and nowhere NaN."""
    assert actual.shape == expected.shape
    blind = expected == -math.inf
    assert torch.equal(actual == -math.inf, blind)
    difference = (actual.double() - expected.double())[~blind].abs()
    assert not difference.isnan().any()
    return difference.max().item() if difference.numel() else 0.0


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("seed", range(120))
def test_out_lse_and_gradients_equal_the_naive_ones(seed: int) -> None:
    qkv, variant, chunks = random_case(seed)
    ours, theirs = leaves(qkv), leaves(qkv)
    out, lse = chunked_attention(*ours, return_lse=True, **chunks, **variant)
    expected_out, expected_lse = naive_attention(*theirs, return_lse=True, **variant)
    assert max_error(out, expected_out) <= 1e-10
    assert max_error(lse, expected_lse) <= 1e-10

    # lse of a row that sees no key has no gradient: exclude it, but keep its row of out.
    seen = expected_lse > -math.inf
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)[seen]
    grads = torch.autograd.grad((out, lse[seen]), ours, (dout, dlse))
    expected = torch.autograd.grad((expected_out, expected_lse[seen]), theirs, (dout, dlse))
    for grad, expected_grad in zip(grads, expected, strict=True):
        assert max_error(grad, expected_grad.nan_to_num()) <= 1e-9


def test_the_random_cases_cover_what_they_must() -> None:
    cases = [random_case(seed) for seed in range(120)]
    for name in ("causal", "window_size", "pattern", "softcap", "alibi_slopes", "dropout_p", "scale"):
        assert sum(name in variant for _, variant, _ in cases) >= 20, name
    several = [
        (qkv, chunks)
        for qkv, _, chunks in cases
        if chunks["q_chunk"] and chunks["k_chunk"] and qkv[0].shape[1] > 16 and qkv[1].shape[1] > 16
    ]
    assert len(several) >= 15  # more than one chunk either way


def test_gradcheck() -> None:
    q, k, v, bias = torch.randn(1, 4, 2, 2), torch.randn(1, 5, 1, 2), torch.randn(1, 5, 1, 3), torch.randn(1, 2, 4, 5)
    inputs = [tensor.double().requires_grad_() for tensor in (q, k, v, bias)]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return chunked_attention(
            q, k, v, bias=bias, q_chunk=2, k_chunk=3, return_lse=True, softcap=2.0, dropout_p=0.3, dropout_seed=5,
            window_size=(3, 1), alibi_slopes=torch.tensor([0.1, 0.2]),
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(
    "shape", [(2, 4, 9, 11), (1, 4, 9, 11), (2, 1, 9, 11), (1, 1, 1, 11), (2, 4, 9, 1), (1, 1, 1, 1)]
)
def test_a_bias_and_its_gradient(shape: tuple[int, ...], make_qkv) -> None:
    qkv = make_qkv(q_len=9, kv_len=11, q_heads=4, kv_heads=2)
    bias = torch.randn(shape, dtype=torch.float64)
    ours, theirs = leaves([*qkv, bias]), leaves([*qkv, bias])
    out = chunked_attention(*ours[:3], bias=ours[3], causal=True, q_chunk=4, k_chunk=3)

    q, k, v, b = theirs
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) / math.sqrt(8) + b
    probs = torch.softmax(scores.masked_fill(~Causal().mask(9, 11), -math.inf), dim=-1)
    expected = torch.einsum("bhij,bjhd->bihd", probs, v.repeat_interleave(2, dim=2))
    assert max_error(out, expected) <= 1e-12

    dout = torch.randn_like(out)
    grads, expected_grads = torch.autograd.grad(out, ours, dout), torch.autograd.grad(expected, theirs, dout)
    assert grads[3].shape == shape
    assert all(max_error(a, b) <= 1e-10 for a, b in zip(grads, expected_grads, strict=True))


def test_a_bias_of_minus_infinity_hides_and_gives_no_gradient(make_qkv) -> None:
    q, k, v = leaves(list(make_qkv(q_len=6, kv_len=6)))
    visible = torch.rand(1, 1, 6, 6) < 0.5
    visible[..., 2, :] = False  # a row that sees nothing
    bias = torch.zeros(1, 1, 6, 6, dtype=torch.float64).masked_fill_(~visible, -math.inf).requires_grad_()
    out = chunked_attention(q, k, v, bias=bias, q_chunk=4, k_chunk=4)
    assert max_error(out, naive_attention(q, k, v, mask=visible)) <= 1e-12
    assert (out[:, 2] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[3][~visible] == 0).all()
    assert (grads[3][visible] != 0).any()


def test_what_the_mask_hides_the_bias_cannot_show(make_qkv) -> None:
    q, k, v = make_qkv(q_len=6, kv_len=6)
    bias = torch.zeros(1, 1, 6, 6, dtype=torch.float64).masked_fill_(~Causal().mask(6, 6), 1e9)
    assert max_error(chunked_attention(q, k, v, bias=bias, causal=True), naive_attention(q, k, v, causal=True)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", [{}, {"causal": True, "softcap": 5.0}, {"dropout_p": 0.2, "dropout_seed": 3}])
def test_low_precision_obeys_flash_attentions_rule(dtype: torch.dtype, variant: Case, make_qkv) -> None:
    qkv = make_qkv(q_len=70, kv_len=90, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype)
    exact, plain, ours = leaves([t.double() for t in qkv]), leaves(list(qkv)), leaves(list(qkv))
    outs = [naive_attention(*exact, **variant), naive_attention(*plain, **variant)]
    outs.append(chunked_attention(*ours, q_chunk=32, k_chunk=32, **variant))
    assert outs[2].dtype == dtype
    assert max_error(outs[2], outs[0]) <= 2 * max_error(outs[1], outs[0]) + 1e-5
    dout = torch.randn_like(outs[0]).to(dtype)
    grads = [
        torch.autograd.grad(out, inputs, dout.to(out.dtype))
        for out, inputs in zip(outs, (exact, plain, ours), strict=True)
    ]
    for true, rough, grad in zip(*grads, strict=True):
        assert grad.dtype == dtype
        assert max_error(grad, true) <= 3 * max_error(rough, true) + 1e-4 * true.abs().max().item()


def test_float16_scores_that_overflow_are_computed_in_float32() -> None:
    q, k = torch.full((1, 4, 1, 64), 40.0).half(), torch.full((1, 9, 1, 64), 40.0).half()  # q . k is 102,400
    v = torch.randn(1, 9, 1, 64).half()
    assert naive_attention(q, k, v).isnan().any()
    out = chunked_attention(q, k, v, k_chunk=2)
    torch.testing.assert_close(out.float(), v.float().mean(dim=1, keepdim=True).expand(1, 4, 1, 64), atol=1e-3, rtol=0)


def test_the_chunking_changes_only_the_rounding(make_qkv) -> None:
    q, k, v = make_qkv(q_len=50, kv_len=60, q_heads=4)
    arguments: Case = {"causal": True, "dropout_p": 0.2, "dropout_seed": 11}
    whole = chunked_attention(q, k, v, q_chunk=64, k_chunk=64, **arguments)
    for q_chunk, k_chunk in [(1, 20), (7, 13), (50, 1), (1, 60), (1000, 3)]:
        assert max_error(chunked_attention(q, k, v, q_chunk=q_chunk, k_chunk=k_chunk, **arguments), whole) <= 1e-12


def test_the_order_of_the_summaries_does_not_matter_and_pairs_merge_to_the_same() -> None:
    parts = [
        SoftmaxState(10 * torch.randn(3, dtype=torch.float64), 1 + torch.rand(3).double(), torch.randn(3, 2).double())
        for _ in range(3)
    ]
    parts.append(SoftmaxState.empty([3], 2, dtype=torch.float64))
    by_pairs = merge(merge(parts[0], parts[1]), merge(parts[2], parts[3]))
    for order in permutations(parts):
        for ours, theirs in zip(finish(merge_all(order)), finish(by_pairs), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_a_batch_in_parts_drops_the_same_pairs(make_qkv) -> None:
    qkv = make_qkv(batch=3, q_len=20, kv_len=20)
    dropout: Case = {"dropout_p": 0.5, "dropout_seed": 7}
    whole = chunked_attention(*qkv, **dropout)
    parts = [chunked_attention(*(t[i : i + 1] for t in qkv), first_batch=i, **dropout) for i in range(3)]
    assert max_error(torch.cat(parts), whole) <= 1e-12


def test_values_of_another_size_than_keys(make_qkv) -> None:
    q, k, v = make_qkv(q_len=5, kv_len=9, head_dim=8)
    wide = torch.cat([v, v[..., :3] * 2], dim=-1)  # [batch, kv_len, kv_heads, 11]
    out = chunked_attention(q, k, wide, k_chunk=4)
    expected = naive_attention(q, k, v)
    assert max_error(out, torch.cat([expected, expected[..., :3] * 2], dim=-1)) <= 1e-12


def test_the_output_dtype_is_rounded_to_once(make_qkv) -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    out = chunked_attention(q, k, v, output_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert max_error(out, chunked_attention(q.float(), k.float(), v.float())) == 0
    assert torch.equal(out.bfloat16(), chunked_attention(q, k, v))


def test_autocast_does_not_reach_inside(make_qkv) -> None:
    qkv = make_qkv(q_len=40, kv_len=40, dtype=torch.float32)
    plain, cast = leaves(list(qkv)), leaves(list(qkv))
    out = chunked_attention(*plain, causal=True)
    grads = torch.autograd.grad(out.sum(), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_cast = chunked_attention(*cast, causal=True)
        grads_cast = torch.autograd.grad(out_cast.sum(), cast)
    assert torch.equal(out_cast, out)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_cast, strict=True))


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["constant dout", "squared"])
def test_a_second_derivative_is_refused(make_qkv, loss) -> None:
    """Also where the incoming gradient is a constant: PyTorch's once_differentiable would drop the second order."""
    inputs = leaves(list(make_qkv()))
    with pytest.raises(InvalidArgumentError, match=r"^create_graph is True; chunked_attention .* naive_attention\.$"):
        torch.autograd.grad(loss(chunked_attention(*inputs)), inputs, create_graph=True)


def test_inputs_that_are_views_are_neither_copied_wrongly_nor_changed(make_qkv) -> None:
    qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in make_qkv(q_len=20, kv_len=20)]
    before = [t.clone() for t in qkv]
    out = chunked_attention(*qkv, causal=True, q_chunk=8, k_chunk=8)
    assert max_error(out, naive_attention(*qkv, causal=True)) <= 1e-12
    assert all(torch.equal(a, b) for a, b in zip(before, qkv, strict=True))


def flops(*qkv: torch.Tensor, **arguments: Any) -> int:
    with counters.count() as tally:
        chunked_attention(*qkv, **arguments)
    return tally.flops


def test_the_cost_follows_the_chunks_that_the_pattern_leaves() -> None:
    q, k, v = (torch.randn(1, 1024, 2, 8) for _ in range(3))
    dense = 2 * 2 * 2 * 1024 * 1024 * 8  # two products, two heads
    assert flops(q, k, v, q_chunk=64, k_chunk=64) == dense
    chunks = 16
    assert flops(q, k, v, q_chunk=64, k_chunk=64, causal=True) == dense * (chunks + 1) // (2 * chunks)
    # A window of 128 reaches back into two chunks beside a query's own; the first two query chunks have fewer.
    window = LocalWindow(128, 0)
    assert flops(q, k, v, q_chunk=64, k_chunk=64, pattern=window) == dense * (3 * chunks - 3) // chunks**2
    quarter = BlockSparsePattern([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], 256)
    assert flops(q, k, v, pattern=quarter) == dense // 4  # the default chunks fit blocks of 256


def test_the_backward_pass_costs_three_times_the_forward_products() -> None:
    qkv = leaves([torch.randn(1, 100, 2, 8) for _ in range(3)])
    with counters.count() as forward:
        out = chunked_attention(*qkv, q_chunk=32, k_chunk=32, causal=True)
    with counters.count() as backward:
        out.sum().backward()
    assert backward.flops == 3 * forward.flops > 0


def test_the_summaries_are_written_and_read_again() -> None:
    """One summary is head_dim + 2 float32 for each row, of each chunk of keys; the merge reads what was written."""
    q, k, v = (torch.randn(1, 256, 2, 8) for _ in range(3))
    with counters.count(fast_memory_bytes=1 << 30) as tally:
        chunked_attention(q, k, v, q_chunk=64, k_chunk=64)
    written = 4 * 2 * 256 * (8 + 2) * 4
    assert tally.by_name["chunked.summaries"].bytes_written == written
    assert tally.by_name["chunked.merge"].bytes_read == written
    assert tally.by_name["chunked.merge"].bytes_written == 2 * 256 * (8 + 1) * 4


def test_the_default_chunk_balances_scores_against_summaries() -> None:
    plain = Variant(scale=1.0)
    assert default_k_chunk(AttentionShape(1, 1, 4096, 8, 8, 64), plain) == 512  # sqrt(4096 * 64)
    assert default_k_chunk(AttentionShape(1, 1, 0, 8, 8, 64), plain) == 64
    assert default_k_chunk(AttentionShape(1, 1, 65536, 8, 8, 64), Variant(scale=1.0, pattern=Causal())) == 256


def test_peak_memory_is_a_tenth_of_the_naive_one_and_grows_linearly(peak_bytes, loglog_slope) -> None:
    lengths, peaks = [1024, 4096], []
    for n in lengths:
        q, k, v = (torch.randn(1, n, 8, 64) for _ in range(3))
        peaks.append(peak_bytes(lambda q=q, k=k, v=v: chunked_attention(q, k, v, causal=True)))
    naive = 2 * 4096 * 4096 * 8 * 4  # S and P, as measured in test_tiled
    print(f"chunked: {peaks} bytes at {lengths}; naive needs {naive / peaks[1]:.0f} times as much at 4096")
    assert peaks[1] <= naive / 10
    assert loglog_slope(lengths, peaks) <= 1.1


def test_peak_memory_of_both_passes_grows_linearly(peak_bytes, loglog_slope) -> None:
    lengths, peaks = [1024, 2048, 4096], []
    for n in lengths:
        qkv = [torch.randn(1, n, 1, 64, requires_grad=True) for _ in range(3)]

        def both_passes(qkv: list[torch.Tensor] = qkv) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(chunked_attention(*qkv).sum(), qkv)

        peaks.append(peak_bytes(both_passes))
    print(f"chunked, forward and backward: {peaks} bytes at {lengths}")
    assert loglog_slope(lengths, peaks) <= 1.1
    assert peaks[2] <= 2 * 4096 * 4096 * 4 / 10  # of what the naive forward alone needs


def test_grouped_heads_do_not_repeat_the_keys(peak_bytes) -> None:
    q, k, v = torch.randn(1, 16, 32, 16), torch.randn(1, 8192, 1, 16), torch.randn(1, 8192, 1, 16)
    repeated_keys = 32 * k.numel() * 4
    assert peak_bytes(lambda: chunked_attention(q, k, v)) < repeated_keys / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_chunk": 0}, "q_chunk is 0;"),
        ({"k_chunk": 1.5}, "k_chunk is 1.5;"),
        ({"first_batch": -1}, "first_batch is -1;"),
        ({"output_dtype": torch.int8}, "output_dtype is torch.int8;"),
        ({"bias": 3.0}, "bias is of type float;"),
        ({"bias": torch.zeros(2, 2, 7, 7, dtype=torch.bool)}, "bias has dtype torch.bool;"),
        ({"bias": torch.zeros(7, 7)}, r"bias has shape \[7, 7\] and the scores it is added to \[2, 2, 7, 7\];"),
        ({"bias": torch.zeros(2, 2, 7, 6)}, r"bias has shape \[2, 2, 7, 6\] and the scores it is added to"),
        ({"bias": torch.zeros(1, 1, 7, 7, device="meta")}, "bias is on meta and the scores on cpu;"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes requires a gradient;"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0;"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: Case, message: str, make_qkv) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        chunked_attention(*make_qkv(), **arguments)


def test_values_of_another_length_are_refused(make_qkv) -> None:
    q, k, v = make_qkv()
    with pytest.raises(InvalidArgumentError, match=r"v has shape \[2, 6, 2, 5\] and k \[2, 7, 2, 8\]"):
        chunked_attention(q, k, v[:, :6, :, :5])
