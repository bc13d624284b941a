"""xFormers' interface: its shapes, its arguments, its semantics. The biases are tested in attn_bias/."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vllm_teach import counters
from vllm_teach.attention import attn_bias as ab
from vllm_teach.attention.memory_efficient import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
)
from vllm_teach.attention.merge_attentions import merge_attentions
from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.split_kv import merge_attention
from vllm_teach.errors import InvalidArgumentError


def equivalent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The "equivalent PyTorch code" of xFormers' documentation."""
    query, key, value = (x.transpose(1, 2) for x in (q / q.shape[-1] ** 0.5, k, v))
    attn = query @ key.transpose(-2, -1)
    attn = (attn if bias is None else attn + bias).softmax(-1)
    return (attn @ value).transpose(1, 2)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


def draw(*shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def test_the_signature_is_xformers() -> None:
    parameters = inspect.signature(memory_efficient_attention).parameters
    assert [(name, p.default) for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_bias", None),
        ("p", 0.0),
        ("scale", None),
    ]
    assert {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == {
        "op": None,
        "output_dtype": None,
    }


def test_heads_apart() -> None:
    q, k, v = draw((2, 7, 3, 8), (2, 9, 3, 8), (2, 9, 3, 5))
    out = memory_efficient_attention(q, k, v)
    assert out.shape == (2, 7, 3, 5)
    close(out, equivalent(q, k, v))
    close(memory_efficient_attention(q, k, v, scale=0.2), equivalent(q * 0.2 * 8**0.5, k, v))


def test_one_head() -> None:
    q, k, v = draw((2, 7, 8), (2, 9, 8), (2, 9, 8))
    out = memory_efficient_attention(q, k, v, ab.LowerTriangularMask())
    expected = memory_efficient_attention(q[:, :, None], k[:, :, None], v[:, :, None], ab.LowerTriangularMask())
    assert out.shape == (2, 7, 8)
    assert torch.equal(out, expected[:, :, 0])


def test_groups_of_heads_and_the_gradient_of_a_shared_head() -> None:
    """The example of xFormers' documentation, which has no backward pass for it."""
    tensors = [t.requires_grad_() for t in draw((2, 7, 6, 8), (2, 9, 2, 8), (2, 9, 2, 8))]
    q, k, v = tensors
    shared = [x[:, :, :, None].expand(-1, -1, -1, 3, -1) for x in (k, v)]
    out = memory_efficient_attention(q.unflatten(2, (2, 3)), *shared)
    assert out.shape == (2, 7, 2, 3, 8)
    expected = naive_attention(q, k, v)
    close(out.flatten(2, 3), expected)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out, tensors, dout.view_as(out)), torch.autograd.grad(expected, tensors, dout)
    for grad, expected_grad in zip(*grads, strict=True):
        close(grad, expected_grad)


def test_groups_whose_heads_have_keys_of_their_own() -> None:
    q, k, v = draw((1, 7, 2, 3, 8), (1, 9, 2, 3, 8), (1, 9, 2, 3, 8))
    out = memory_efficient_attention(q, k, v)
    close(out.flatten(2, 3), equivalent(*(x.flatten(2, 3) for x in (q, k, v))))
    half_shared = memory_efficient_attention(q, k[:, :, :, :1].expand(-1, -1, -1, 3, -1), v)
    close(
        half_shared.flatten(2, 3),
        equivalent(q.flatten(2, 3), k[:, :, :, :1].expand_as(k).flatten(2, 3), v.flatten(2, 3)),
    )
    alone = memory_efficient_attention(q[:, :, :, :1], k[:, :, :, :1], v[:, :, :, :1])
    close(alone[:, :, :, 0], equivalent(q[:, :, :, 0], k[:, :, :, 0], v[:, :, :, 0]))


def test_an_expanded_head_is_not_repeated_in_memory(peak_bytes) -> None:
    q, k = torch.randn(1, 16, 2, 16, 16), torch.randn(1, 8192, 2, 1, 16)
    shared = k.expand(-1, -1, -1, 16, -1)
    assert peak_bytes(lambda: memory_efficient_attention(q, shared, shared)) < 16 * k.numel() * 4 / 2


@pytest.mark.parametrize("sizes", [(2, 3, 7, 9), (1, 3, 7, 9), (2, 1, 1, 9), (1, 1, 7, 1)])
def test_a_tensor_is_added_to_the_scores_and_has_a_gradient(sizes: tuple[int, ...]) -> None:
    q, k, v, bias = draw((2, 7, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8), sizes)
    ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v, bias)] for _ in range(2))
    out, expected = memory_efficient_attention(*ours), equivalent(*theirs)
    close(out, expected)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, ours, dout), torch.autograd.grad(expected, theirs, dout)
    for grad, expected_grad in zip(*grads, strict=True):
        close(grad, expected_grad)


def test_a_tensor_for_one_head_and_for_groups() -> None:
    q, k, v, bias = draw((2, 7, 8), (2, 9, 8), (2, 9, 8), (2, 7, 9))
    close(
        memory_efficient_attention(q, k, v, bias)[:, :, None],
        equivalent(*(x[:, :, None] for x in (q, k, v)), bias=bias[:, None]),
    )
    q, k, v = draw((2, 7, 2, 3, 8), (2, 9, 2, 3, 8), (2, 9, 2, 3, 8))
    for sizes in ((2, 2, 3, 7, 9), (1, 1, 1, 7, 9), (2, 2, 1, 1, 9), (2, 1, 3, 7, 1)):
        (bias,) = draw(sizes)
        whole = bias.expand(2, 2, 3, 7, 9).flatten(1, 2)
        out = memory_efficient_attention(q, k, v, bias)
        close(out.flatten(2, 3), equivalent(*(x.flatten(2, 3) for x in (q, k, v)), bias=whole))


def test_a_tensor_may_hide_keys() -> None:
    q, k, v = draw((1, 7, 3, 8), (1, 9, 3, 8), (1, 9, 3, 8))
    visible = torch.rand(1, 1, 7, 9) < 0.5
    visible[..., 3, :] = False
    bias = torch.zeros(1, 1, 7, 9).masked_fill(~visible, -math.inf)
    close(memory_efficient_attention(q, k, v, bias), naive_attention(q, k, v, mask=visible))


def test_the_articles_block_sparse_pattern_as_attn_bias() -> None:
    """The article imports it from xformers.ops.sparse_attention, where it never was."""
    q, k, v = (t.requires_grad_() for t in draw((1, 1024, 2, 8), (1, 1024, 2, 8), (1, 1024, 2, 8), dtype=torch.float32))
    layout = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
    sparse = BlockSparsePattern(layout, block=256)
    with counters.count() as tally:
        out = memory_efficient_attention(q, k, v, attn_bias=sparse)
    with counters.count() as dense:
        memory_efficient_attention(q, k, v)
    assert tally.flops == dense.flops * 7 // 16
    mask = layout.bool().repeat_interleave(256, 0).repeat_interleave(256, 1)
    expected = naive_attention(q.double(), k.double(), v.double(), mask=mask)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)]
    for grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=2e-5, rtol=1e-4)


def test_any_pattern_as_attn_bias() -> None:
    q, k, v = draw((1, 30, 2, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    for pattern in (Causal(), LocalWindow(3, 1), GlobalTokens(2) | LocalWindow(4, 0), Causal() & ~LocalWindow(5, 0)):
        close(memory_efficient_attention(q, k, v, pattern), naive_attention(q, k, v, pattern=pattern))


def test_a_bias_of_ones_own_is_materialised() -> None:
    class EverySecondKey(ab.AttentionBias):
        def materialize(
            self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
        ) -> torch.Tensor:
            bias = torch.zeros(*shape, dtype=dtype, device=device)
            bias[..., 1::2] = -math.inf
            return bias

    q, k, v = draw((2, 7, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8))
    out = memory_efficient_attention(q, k, v, EverySecondKey())
    close(out, equivalent(q, k[:, ::2], v[:, ::2]))
    grouped = memory_efficient_attention(*(x[:, :, None] for x in (q, k, v)), attn_bias=EverySecondKey())
    close(grouped[:, :, 0], out)


def test_dropout_is_seeded_by_pytorchs_generator() -> None:
    q, k, v = draw((2, 30, 2, 8), (2, 30, 2, 8), (2, 30, 2, 8))
    torch.manual_seed(3)
    first, second = (memory_efficient_attention(q, k, v, p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(memory_efficient_attention(q, k, v, p=0.5), first)
    assert not torch.equal(first, second)


def test_dropout_has_the_undropped_mean_and_its_own_gradient() -> None:
    q, k = torch.zeros(1, 1, 1, 4).double(), torch.zeros(1, 2000, 1, 4).double()
    v = torch.ones(1, 2000, 1, 1).double().requires_grad_()
    out = memory_efficient_attention(q, k, v, p=0.25)  # the mean of 2,000 numbers that are 0 or 4/3
    assert out.item() == pytest.approx(1, abs=5 * math.sqrt(1 / 3 / 2000))
    (grad,) = torch.autograd.grad(out.sum(), v)
    dropped = grad == 0
    assert 0 < dropped.sum() < 2000
    torch.testing.assert_close(grad[~dropped], torch.full_like(grad[~dropped], 4 / 3 / 2000))
    assert grad.sum().item() == pytest.approx(out.item())


def test_the_output_dtype() -> None:
    q, k, v = draw((1, 20, 2, 8), (1, 20, 2, 8), (1, 20, 2, 8), dtype=torch.bfloat16)
    exact = memory_efficient_attention(q.float(), k.float(), v.float())
    assert torch.equal(memory_efficient_attention(q, k, v, output_dtype=torch.float32), exact)
    assert torch.equal(memory_efficient_attention(q, k, v), exact.bfloat16())
    wide = [t.clone().requires_grad_() for t in (q, k, v)]
    memory_efficient_attention(*wide, output_dtype=torch.float32).sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in wide)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, ab.LowerTriangularMask(), ab.BlockDiagonalCausalMask.from_seqlens([50, 30])])
def test_low_precision_obeys_flash_attentions_rule(dtype: torch.dtype, bias: ab.AttentionBias | None) -> None:
    q, k, v = draw((1, 80, 2, 32), (1, 80, 2, 32), (1, 80, 2, 32), dtype=dtype)
    mask = None if bias is None else bias.materialize((80, 80)) == 0
    exact = naive_attention(q.double(), k.double(), v.double(), mask=mask)
    plain_error = (naive_attention(q, k, v, mask=mask).double() - exact).abs().max()
    error = (memory_efficient_attention(q, k, v, bias).double() - exact).abs().max()
    assert error <= 2 * plain_error + 1e-5


def test_forward_is_cut_off_from_autograd_and_gives_lse() -> None:
    q, k, v = (t.requires_grad_() for t in draw((2, 7, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8)))
    expected, expected_lse = naive_attention(q, k, v, causal=True, return_lse=True)
    bias = ab.LowerTriangularFromBottomRightMask()
    out = memory_efficient_attention_forward(q, k, v, bias)
    same, lse = memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    close(out, expected.detach())
    close(lse, expected_lse.detach())
    assert torch.equal(out, same)
    assert not any(x.requires_grad for x in (out, same, lse))
    grouped = [x[:, :, None] for x in (q, k, v)]
    assert memory_efficient_attention_forward_requires_grad(*grouped)[1].shape == (2, 1, 3, 7)
    single = [x[:, :, 0] for x in (q, k, v)]
    assert memory_efficient_attention_forward_requires_grad(*single)[1].shape == (2, 1, 7)


@pytest.mark.parametrize("groups", [False, True])
def test_parts_merge_to_the_whole_with_gradients(groups: bool) -> None:
    shapes = ((2, 7, 2, 3, 8), (2, 9, 2, 3, 8)) if groups else ((2, 7, 6, 8), (2, 9, 6, 8))
    tensors = [t.requires_grad_() for t in draw(shapes[0], shapes[1], shapes[1])]
    q, k, v = tensors
    parts = [memory_efficient_attention_partial(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 9), (9, 9))]
    out, lse = merge_attentions([p[0] for p in parts], [p[1] for p in parts])
    expected, expected_lse = memory_efficient_attention_partial(q, k, v)
    close(out, expected)
    assert lse is not None
    close(lse, expected_lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = [torch.autograd.grad(pair, tensors, (dout, dlse)) for pair in ((out, lse), (expected, expected_lse))]
    for grad, expected_grad in zip(*grads, strict=True):
        close(grad, expected_grad)
    stacked = merge_attentions(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), write_lse=False)
    assert torch.equal(stacked[0], out)
    assert stacked[1] is None


def test_parts_are_float32_and_round_once() -> None:
    q, k, v = draw((1, 5, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8), dtype=torch.bfloat16)
    parts = [memory_efficient_attention_partial(q, k[:, a : a + 4], v[:, a : a + 4]) for a in (0, 4)]
    assert parts[0][0].dtype == torch.float32
    out, _ = merge_attentions([p[0] for p in parts], [p[1] for p in parts], output_dtype=torch.bfloat16)
    assert torch.equal(out, memory_efficient_attention(q, k, v))


def test_rows_that_see_no_key_in_any_part_merge_to_0() -> None:
    q, k, v = (t.requires_grad_() for t in draw((1, 5, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8)))
    bias = ab.LowerTriangularFromBottomRightMask()
    parts = [memory_efficient_attention_partial(q, k, v, bias), memory_efficient_attention_partial(q, k, v, bias)]
    out, lse = merge_attentions([p[0] for p in parts], [p[1] for p in parts])
    assert lse is not None
    assert (out[:, :2] == 0).all()
    assert (lse[:, :, :2] == -math.inf).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum() + lse[:, :, 2:].sum(), (q, k, v)))


def test_parts_that_do_not_fit_are_refused() -> None:
    out, lse = torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 5)
    with pytest.raises(InvalidArgumentError, match="attn_split holds 0 parts and lse_split 0;"):
        merge_attentions([], [])
    with pytest.raises(InvalidArgumentError, match="attn_split holds 2 parts and lse_split 1;"):
        merge_attentions([out, out], [lse])
    with pytest.raises(
        InvalidArgumentError, match=r"attn_split\[1\] has shape \[1, 5, 2, 7\] and lse_split\[1\] \[1, 2, 5\]"
    ):
        merge_attentions([out, out[..., :7]], [lse, lse])
    with pytest.raises(InvalidArgumentError, match=r"lse_split\[0\] \[1, 5, 2\]"):
        merge_attentions([out], [lse.transpose(1, 2)])
    for function in (memory_efficient_attention_partial, memory_efficient_attention_forward_requires_grad):
        with pytest.raises(InvalidArgumentError, match=r"p is 0\.1; only memory_efficient_attention itself has"):
            function(out, out, out, p=0.1)


Q, K = torch.zeros(2, 7, 3, 8), torch.zeros(2, 9, 3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": 1}, "query is of type int;"),
        ({"key": None}, "key is of type NoneType;"),
        ({"query": Q[0, 0], "key": K[0, 0], "value": K[0, 0]}, r"query has shape \[3, 8\];"),
        ({"key": K[:, :, :1]}, r"key has shape \[2, 9, 1, 8\] and query \[2, 7, 3, 8\];.* Expand shared heads"),
        ({"key": K[:1]}, r"key has shape \[1, 9, 3, 8\] and query \[2, 7, 3, 8\];"),
        ({"key": K[..., :4]}, r"key has shape \[2, 9, 3, 4\] and query \[2, 7, 3, 8\];"),
        ({"key": K[:, :, 0]}, r"key has shape \[2, 9, 8\] and query"),
        ({"value": K[:, :8]}, r"value has shape \[2, 8, 3, 8\] and key \[2, 9, 3, 8\];"),
        ({"value": K[..., :0]}, r"value has shape \[2, 9, 3, 0\] and key"),
        ({"value": K.double()}, "value has dtype torch.float64 and query torch.float32;"),
        ({"key": K.to("meta")}, "key is on meta and query on cpu;"),
        ({"query": Q.int(), "key": K.int(), "value": K.int()}, "query has dtype torch.int32;"),
        ({"query": Q[..., :0], "key": K[..., :0]}, r"query has shape \[2, 7, 3, 0\];"),
        ({"attn_bias": torch.zeros(2, 3, 7, 8)}, r"attn_bias has shape \[2, 3, 7, 8\] .* to \[2, 3, 7, 9\];"),
        ({"attn_bias": torch.zeros(7, 9)}, r"attn_bias has shape \[7, 9\] .* to \[2, 3, 7, 9\];"),
        ({"attn_bias": torch.zeros(2, 3, 7, 9, dtype=torch.bool)}, "attn_bias has dtype torch.bool; it is added"),
        ({"attn_bias": torch.zeros(2, 3, 7, 9, device="meta")}, "attn_bias is on meta and the scores on cpu;"),
        ({"attn_bias": ab.LowerTriangularMask}, "attn_bias is the class LowerTriangularMask; give"),
        ({"attn_bias": "causal"}, "attn_bias is of type str; give"),
        ({"p": 1.0}, "p is 1.0;"),
        ({"p": -0.1}, "p is -0.1;"),
        ({"p": None}, "p is of type NoneType;"),
        ({"scale": math.nan}, "scale is nan;"),
        ({"op": "cutlass"}, "op is 'cutlass'; leave it None"),
        ({"output_dtype": torch.int32}, "output_dtype is torch.int32;"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        memory_efficient_attention(**{"query": Q, "key": K, "value": K, **arguments})


def test_a_leaf_with_expanded_heads_has_a_gradient_for_each_of_them() -> None:
    """One head in memory, but a place for a gradient for each: no one adds these up behind a leaf."""
    draw = torch.Generator().manual_seed(3)
    query, one = (torch.randn(2, 5, 2, heads, 8, generator=draw, dtype=torch.float64) for heads in (3, 1))
    leaves = [one.expand(-1, -1, -1, 3, -1).detach().requires_grad_() for _ in range(2)]
    apart = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    got = torch.autograd.grad(memory_efficient_attention(query, *leaves).square().sum(), leaves)
    want = torch.autograd.grad(memory_efficient_attention(query, *apart).square().sum(), apart)
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))


def test_p_is_named_as_the_caller_named_it() -> None:
    x = torch.randn(1, 3, 1, 8)
    torch.manual_seed(1)
    want = memory_efficient_attention(x, x, x, p=0.25)
    torch.manual_seed(1)
    assert torch.equal(memory_efficient_attention(x, x, x, p=np.float32(0.25)), want)
    for odd in ("x", 1.0, None):
        with pytest.raises(InvalidArgumentError, match=r"^p is .*; give a probability"):
            memory_efficient_attention(x, x, x, p=odd)
    with pytest.raises(InvalidArgumentError, match=r"^p is of type Tensor"):
        memory_efficient_attention_partial(x, x, x, p=torch.ones(2))


@pytest.mark.parametrize("merge", [merge_attentions, merge_attention])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((None, None), "is of type NoneType; give a list of tensors"),
        (("ab", "cd"), "is of type str; give a list of tensors"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "is of type Tensor; give a list"),
        (([], []), "holds 0 parts and .* 0; give one or more"),
        (([np.ones((2, 3, 4, 8))], [torch.ones(2, 4, 3)]), r"\[0\] is of type ndarray"),
        (([torch.ones(2, 3, 8)], [torch.ones(2, 3)]), r"\[0\] has shape \[2, 3, 8\]"),
        (([torch.ones(2, 3, 4, 8).long()], [torch.ones(2, 4, 3)]), r"\[0\] has dtype torch.int64"),
        (([torch.ones(2, 3, 4, 8)], [torch.ones(2, 4, 3, device="meta")]), r"\[0\] is on meta and .*\[0\] on cpu"),
        (
            ([torch.ones(2, 3, 4, 8)] * 2, [torch.ones(2, 4, 3), torch.ones(2, 4, 3).double()]),
            r"\[1\] has dtype torch.float64 on cpu and .*\[0\] torch.float32",
        ),
    ],
)
def test_parts_that_are_not_of_one_attention_are_refused(merge, parts, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        merge(*parts)


def test_the_two_names_of_the_merge_are_one_rule() -> None:
    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 4, 5)
    lses[0, 0] = lses[1, 0] = lses[2, 0, :2] = -math.inf
    for a, b in zip(merge_attention(list(outs), list(lses)), merge_attentions(outs, lses), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InvalidArgumentError, match=r"^output_dtype is 'x';"):
        merge_attentions(outs, lses, output_dtype="x")
