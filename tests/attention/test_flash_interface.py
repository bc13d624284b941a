import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_teach.attention.flash_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from vllm_teach.attention.reference import naive_attention
from vllm_teach.errors import InvalidArgumentError

Tensors = tuple[torch.Tensor, ...]
REQUIRED = inspect.Parameter.empty
VARIANT = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
LENGTHS = [
    ("cu_seqlens_q", REQUIRED),
    ("cu_seqlens_k", REQUIRED),
    ("max_seqlen_q", REQUIRED),
    ("max_seqlen_k", REQUIRED),
]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (flash_attn_func, [("q", REQUIRED), ("k", REQUIRED), ("v", REQUIRED), *VARIANT]),
        (flash_attn_kvpacked_func, [("q", REQUIRED), ("kv", REQUIRED), *VARIANT]),
        (flash_attn_qkvpacked_func, [("qkv", REQUIRED), *VARIANT]),
        (
            flash_attn_varlen_func,
            [("q", REQUIRED), ("k", REQUIRED), ("v", REQUIRED), *LENGTHS, *VARIANT, ("block_table", None)],
        ),
    ],
)
def test_the_signatures_are_flash_attentions(function, expected):
    parameters = inspect.signature(function).parameters.values()
    assert [(p.name, p.default) for p in parameters] == expected
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def random_variant(rng: random.Random, batch: int, q_heads: int) -> dict[str, Any]:
    """Arguments in FlashAttention's words."""
    slopes = torch.rand(rng.choice([(q_heads,), (batch, q_heads)]))
    return {
        "softmax_scale": rng.choice([None, 0.3]),
        "causal": rng.random() < 0.5,
        "window_size": rng.choice([(-1, -1), (-1, -1), (3, 0), (2, 1), (-1, 2), (0, -1)]),
        "softcap": rng.choice([0.0, 1.5]),
        "alibi_slopes": rng.choice([None, slopes]),
    }


def in_our_words(variant: dict[str, Any]) -> dict[str, Any]:
    return {"scale" if name == "softmax_scale" else name: value for name, value in variant.items()}


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def gradients(function: Callable[..., Tensors], tensors: Tensors) -> Tensors:
    """The results of `function` and the gradients of a fixed, uneven sum of them, blind rows' log-sum-exp left out."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    results = function(*leaves)
    total = sum((r.masked_fill(r.isinf(), 0) * torch.linspace(-1, 1, r.numel()).view_as(r)).sum() for r in results)
    return *(r.detach() for r in results), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("seed", range(30))
def test_dense_results_and_gradients_are_the_naive_ones(make_qkv, seed):
    rng = random.Random(seed)
    q_heads, kv_heads = rng.choice([(2, 2), (4, 2), (3, 1)])
    sizes = {"q_len": rng.choice([1, 5, 9]), "kv_len": rng.choice([1, 5, 9, 14]), "head_dim": rng.choice([1, 8])}
    qkv = make_qkv(**sizes, q_heads=q_heads, kv_heads=kv_heads, seed=seed)
    variant = random_variant(rng, 2, q_heads)
    actual = gradients(lambda *t: flash_attn_func(*t, **variant, return_attn_probs=True)[:2], qkv)
    expected = gradients(lambda *t: naive_attention(*t, **in_our_words(variant), return_lse=True), qkv)
    for a, b in zip(actual, expected, strict=True):
        close(a, b)
    close(flash_attn_func(*qkv, **variant), expected[0])
    assert actual[1].shape == (2, q_heads, sizes["q_len"])


def test_positional_arguments_mean_what_they_mean_there(make_qkv):
    q, k, v = make_qkv(q_len=9, kv_len=9)
    slopes = torch.tensor([0.5, 0.25])
    out, lse, probs = flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 2.0, slopes, True, True)
    arguments = {"scale": 0.3, "causal": True, "window_size": (4, 0), "softcap": 2.0, "alibi_slopes": slopes}
    expected, expected_lse = naive_attention(q, k, v, return_lse=True, **arguments)
    close(out, expected)
    close(lse, expected_lse)
    assert probs.shape == (0,)  # FlashAttention's S_dmask without dropout


@pytest.mark.parametrize(
    ("q_len", "kv_len", "arguments", "visible"),
    [
        (2, 5, {"causal": True}, ["11110", "11111"]),
        (5, 2, {"causal": True}, ["00", "00", "00", "10", "11"]),
        (3, 5, {"window_size": (1, 0)}, ["01100", "00110", "00011"]),
        (3, 5, {"window_size": (0, 1)}, ["00110", "00011", "00001"]),
        (2, 4, {"window_size": (-1, 1)}, ["1111", "1111"]),
        (4, 4, {"window_size": (2, 3), "causal": True}, ["1000", "1100", "1110", "0111"]),
        (4, 2, {"window_size": (1, 1)}, ["00", "10", "11", "11"]),
    ],
)
def test_masks_are_aligned_bottom_right_and_inclusive(q_len, kv_len, arguments, visible):
    """v is the identity, so out is the row of probabilities: equal where visible, 0 elsewhere."""
    mask = torch.tensor([[int(c) for c in row] for row in visible], dtype=torch.float64)
    q = torch.zeros(1, q_len, 1, kv_len, dtype=torch.float64)
    k, v = torch.zeros(1, kv_len, 1, kv_len, dtype=torch.float64), torch.eye(kv_len, dtype=torch.float64)[None, :, None]
    out, lse, _ = flash_attn_func(q, k, v, **arguments, return_attn_probs=True)
    close(out[0, :, 0], mask / mask.sum(1, keepdim=True).clamp(min=1))
    close(lse[0, 0], mask.sum(1).log())  # a row that sees nothing: log 0 = -inf


def test_packed_inputs(make_qkv):
    q, k, v = make_qkv(q_len=6, kv_len=6)
    slopes = torch.tensor([0.5, 0.25])
    variant = (0.0, 0.3, True, (3, 0), 2.0, slopes, False, True)
    expected = gradients(lambda *t: flash_attn_func(*t, *variant)[:2], (q, k, v))
    qkv = torch.stack((q, k, v), dim=2)
    actual = gradients(lambda t: flash_attn_qkvpacked_func(t, *variant)[:2], (qkv,))
    for a, b in zip(actual, (*expected[:2], torch.stack(expected[2:], dim=2)), strict=True):
        close(a, b, atol=0)
    kv = torch.stack((k, v), dim=2)
    actual = gradients(lambda *t: flash_attn_kvpacked_func(*t, *variant)[:2], (q, kv))
    for a, b in zip(actual, (*expected[:3], torch.stack(expected[3:], dim=2)), strict=True):
        close(a, b, atol=0)


def seed_of_next_dropout() -> int:
    """The seed that the next call with dropout will draw; the generator is put back."""
    state = torch.get_rng_state()
    seed = int(torch.randint(0, 2**62, ()).item())
    torch.set_rng_state(state)
    return seed


def test_dropout_takes_its_seed_from_pytorchs_generator_and_shows_its_mask(make_qkv):
    qkv = make_qkv(q_len=9, kv_len=12, q_heads=4, kv_heads=2)
    variant = {"causal": True, "softcap": 2.0}
    state = torch.get_rng_state()
    seed = seed_of_next_dropout()
    naive = gradients(lambda *t: naive_attention(*t, dropout_p=0.4, dropout_seed=seed, return_lse=True, **variant), qkv)
    actual = gradients(lambda *t: flash_attn_func(*t, 0.4, return_attn_probs=True, **variant)[:2], qkv)
    for a, b in zip(actual, naive, strict=True):
        close(a, b)
    assert not torch.equal(torch.get_rng_state(), state)

    torch.set_rng_state(state)
    out, _, signed = flash_attn_func(*qkv, 0.4, return_attn_probs=True, **variant)
    close(out, naive[0])
    assert signed.shape == (2, 4, 9, 12)
    assert not signed.requires_grad
    close(signed.abs(), naive_attention(*qkv, return_probs=True, **variant)[1])
    kept = signed.clamp(min=0) / 0.6
    values = qkv[2].repeat_interleave(2, dim=2).transpose(1, 2)  # [batch, q_heads, kv_len, head_dim]
    close((kept @ values).transpose(1, 2), out)
    dropped = (signed < 0).sum() / (signed != 0).sum()
    assert 0.3 < dropped < 0.5


def test_without_dropout_no_random_number_is_drawn(make_qkv):
    state = torch.get_rng_state()
    flash_attn_func(*make_qkv(), causal=True)
    assert torch.equal(torch.get_rng_state(), state)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    count = rng.randint(1, 5)
    return [rng.choice([0, 1, 2, 7]) for _ in range(count)], [rng.choice([0, 1, 5, 9]) for _ in range(count)]


def pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: list[int], k_lens: list[int]) -> list[Tensors]:
    """Each sequence as a dense batch of 1."""
    cut = zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
    return [tuple(t[None] for t in three) for three in cut]


def naive_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: list[int], k_lens: list[int], variant: dict[str, Any]
) -> Tensors:
    """(out [total_q, heads, d], lse [heads, total_q]) of one naive call per sequence."""
    outs, lses = [q[:0]], [q.new_zeros(q.shape[1], 0)]
    for index, piece in enumerate(pieces(q, k, v, q_lens, k_lens)):
        own = in_our_words(variant)
        if own.get("alibi_slopes") is not None and own["alibi_slopes"].dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][index]
        out, lse = naive_attention(*piece, return_lse=True, **own)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def draw_flat(q_lens: list[int], k_lens: list[int], q_heads: int, kv_heads: int) -> Tensors:
    sizes = ((sum(q_lens), q_heads), (sum(k_lens), kv_heads), (sum(k_lens), kv_heads))
    return tuple(torch.randn(*size, 8, dtype=torch.float64) for size in sizes)


@pytest.mark.parametrize("seed", range(30))
def test_varlen_results_and_gradients_are_those_of_each_sequence(seed):
    rng = random.Random(seed)
    q_heads, kv_heads = rng.choice([(2, 2), (4, 2), (3, 1)])
    q_lens, k_lens = random_lengths(rng)
    qkv = draw_flat(q_lens, k_lens, q_heads, kv_heads)
    variant = random_variant(rng, len(q_lens), q_heads)
    lengths = (starts(q_lens), starts(k_lens), max(q_lens) + rng.randint(0, 3), max(k_lens))
    actual = gradients(lambda *t: flash_attn_varlen_func(*t, *lengths, **variant, return_attn_probs=True)[:2], qkv)
    expected = gradients(lambda *t: naive_varlen(*t, q_lens, k_lens, variant), qkv)
    for a, b in zip(actual, expected, strict=True):
        close(a, b)
    assert actual[1].shape == (q_heads, sum(q_lens))


def test_varlen_without_a_sequence():
    q, none = torch.zeros(0, 2, 8), torch.zeros(1, dtype=torch.int32)
    out, lse, probs = flash_attn_varlen_func(q, q, q, none, none, 0, 0, return_attn_probs=True)
    assert (out.shape, lse.shape, probs.shape) == ((0, 2, 8), (2, 0), (0,))
    assert lse.dtype == torch.float32
    _, _, probs = flash_attn_varlen_func(q, q, q, none, none, 3, 4, 0.5, return_attn_probs=True)
    assert probs.shape == (0, 2, 3, 4)


def test_varlen_dropout_shows_its_mask():
    q_lens, k_lens = [3, 0, 5], [4, 2, 6]
    q, k, v = draw_flat(q_lens, k_lens, 2, 1)
    seed = seed_of_next_dropout()
    lengths = (starts(q_lens), starts(k_lens), 7, 6)
    out, _, signed = flash_attn_varlen_func(q, k, v, *lengths, 0.5, causal=True, return_attn_probs=True)
    assert signed.shape == (3, 2, 7, 6)
    expected = []
    for index, (q_, k_, v_) in enumerate(pieces(q, k, v, q_lens, k_lens)):
        q_len, kv_len = q_.shape[1], k_.shape[1]
        mine = signed[index, :, :q_len, :kv_len]
        assert signed[index].count_nonzero() == mine.count_nonzero()  # 0 outside of the sequence
        expected.append((mine.clamp(min=0) / 0.5 @ v_[0, :, 0]).transpose(0, 1))  # [q_len, q_heads, head_dim]
        naive = naive_attention(q_, k_, v_, causal=True, dropout_p=0.5, dropout_seed=seed, first_batch=index)
        close(naive[0], expected[-1])
    close(out, torch.cat(expected))


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_varlen_reads_paged_keys_and_gives_their_gradient(block_size):
    rng = random.Random(block_size)
    q_lens, k_lens = [2, 0, 4, 1, 3], [5, 3, 17, 0, 1]
    q, k, v = draw_flat(q_lens, k_lens, 4, 2)
    counts = [-(-n // block_size) for n in k_lens]
    free = rng.sample(range(sum(counts) + 2), sum(counts))
    tables = [[free.pop() for _ in range(count)] for count in counts]
    table = torch.tensor([row + [-1] * (max(counts) - len(row)) for row in tables], dtype=torch.int32)
    caches = []
    for flat in (k, v):
        cache = torch.full((sum(counts) + 2, block_size, 2, 8), math.nan, dtype=torch.float64)
        for blocks, piece in zip(tables, flat.split(k_lens), strict=True):
            for slot, row in enumerate(piece):
                cache[blocks[slot // block_size], slot % block_size] = row
        caches.append(cache)
    lengths = (starts(q_lens), starts(k_lens), 4, 17)
    variant = {"causal": True, "alibi_slopes": torch.rand(5, 4)}

    def paged(*tensors: torch.Tensor) -> Tensors:
        return flash_attn_varlen_func(*tensors, *lengths, **variant, return_attn_probs=True, block_table=table)[:2]

    out, lse, dq, *d_caches = gradients(paged, (q, *caches))
    expected = gradients(lambda *t: naive_varlen(*t, q_lens, k_lens, variant), (q, k, v))
    for a, b in zip((out, lse, dq), expected[:3], strict=True):
        close(a, b)
    for cache, flat in zip(d_caches, expected[3:], strict=True):
        for blocks, piece in zip(tables, flat.split(k_lens), strict=True):
            for slot, row in enumerate(piece):
                close(cache[blocks[slot // block_size], slot % block_size], row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_keeps_flash_attentions_rule(make_qkv, dtype):
    qkv = make_qkv(batch=1, q_len=200, kv_len=200, q_heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    doubles = tuple(t.double() for t in qkv)
    exact = gradients(lambda *t: (naive_attention(*t, causal=True),), doubles)
    plain = gradients(lambda *t: (naive_attention(*t, causal=True),), qkv)
    dense = gradients(lambda *t: (flash_attn_func(*t, causal=True),), qkv)
    lengths = (starts([200]), starts([200]), 200, 200)
    flat = gradients(lambda *t: (flash_attn_varlen_func(*t, *lengths, causal=True),), tuple(t[0] for t in qkv))
    for actual in (dense, tuple(t[None] for t in flat)):
        assert {t.dtype for t in actual} == {dtype}
        for which, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
            slack = 2 * (p.double() - e).abs().max() + 1e-5
            if which:
                slack = 3 * (p.double() - e).abs().max() + 1e-4 * e.abs().max()
            assert (a.double() - e).abs().max() <= slack


def test_inputs_need_not_be_contiguous_and_are_not_changed(make_qkv):
    qkv = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in make_qkv(q_len=5, kv_len=9))
    before = [t.clone() for t in qkv]
    close(flash_attn_func(*qkv, causal=True), naive_attention(*qkv, causal=True))
    assert all(map(torch.equal, before, qkv))


def test_the_deterministic_flag_changes_nothing(make_qkv):
    qkv = make_qkv(q_len=300, kv_len=300, dtype=torch.float32)
    both = [gradients(lambda *t, d=d: (flash_attn_func(*t, causal=True, deterministic=d),), qkv) for d in (False, True)]
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": torch.randn(2, 7, 3, 8)}, ["v has shape", "k [2, 7, 3, 8]"]),
        ({"q": torch.randn(2, 7, 8)}, ["q has shape [2, 7, 8]"]),
        ({"q": torch.randn(2, 7, 2, 8).half()}, ["k has dtype", "q torch.float16"]),
        ({"dropout_p": 1.0}, ["dropout_p is 1.0"]),
        ({"softmax_scale": math.inf}, ["softmax_scale is inf"]),
        ({"softmax_scale": "8"}, ["softmax_scale", "str"]),
        ({"window_size": (-2, 0)}, ["window_size[0] is -2"]),
        ({"window_size": 5}, ["window_size is 5"]),
        ({"softcap": -1}, ["softcap is -1"]),
        ({"alibi_slopes": torch.ones(2).double()}, ["alibi_slopes", "float64"]),
        ({"causal": None}, ["causal is None"]),
    ],
)
def test_dense_misuse_is_refused(changes, words):
    arguments = {name: torch.randn(2, 7, 2, 8) for name in "qkv"} | changes
    with pytest.raises(InvalidArgumentError) as raised:
        flash_attn_func(**arguments)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("function", "tensors", "words"),
    [
        (flash_attn_qkvpacked_func, [torch.randn(2, 7, 2, 2, 8)], r"qkv has shape \[2, 7, 2, 2, 8\]"),
        (flash_attn_qkvpacked_func, [None], "qkv is of type NoneType"),
        (flash_attn_kvpacked_func, [torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)], r"kv has shape \[2, 7, 2, 8\]"),
    ],
)
def test_wrongly_packed_inputs_are_refused(function, tensors, words):
    with pytest.raises(InvalidArgumentError, match=words):
        function(*tensors)


PAGES = {"k": torch.randn(4, 2, 2, 8), "v": torch.randn(4, 2, 2, 8)}
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_seqlen_q": 3}, ["max_seqlen_q is 3", "length 4"]),
        ({"max_seqlen_k": 2}, ["max_seqlen_k is 2", "length 3"]),
        ({"max_seqlen_q": None}, ["max_seqlen_q is None"]),
        ({"cu_seqlens_q": starts([2, 3])}, ["cu_seqlens_q", "end with 6"]),
        ({"cu_seqlens_k": starts([2, 3, 0])}, ["cu_seqlens_k", "3 sequences"]),
        ({"cu_seqlens_k": torch.tensor([0, 2, 5])}, ["cu_seqlens_k", "int64"]),
        ({"cu_seqlens_q": [0, 2, 6]}, ["cu_seqlens_q", "list"]),
        ({"q": torch.randn(1, 6, 2, 8)}, ["q has shape [1, 6, 2, 8]"]),
        ({"dropout_p": -0.5}, ["dropout_p is -0.5"]),
        ({"alibi_slopes": torch.ones(3, 2)}, ["alibi_slopes", "[2, 2]"]),
        ({"block_table": TABLE}, ["k has shape [5, 2, 8]", "Paged"]),
        (
            PAGES | {"block_table": TABLE, "cu_seqlens_k": starts([2, 5]), "max_seqlen_k": 5},
            ["cu_seqlens_k", "5 keys", "4"],
        ),
        (PAGES | {"block_table": TABLE + 1}, ["block_table holds 4", "0 to 3"]),
        (PAGES | {"block_table": TABLE[:1]}, ["block_table", "[1, 2]"]),
        (PAGES | {"block_table": TABLE[0]}, ["block_table", "shape [2]"]),
        (PAGES | {"block_table": TABLE, "cu_seqlens_k": starts([2])}, ["cu_seqlens_k", "[2]", "[3]"]),
        (PAGES | {"block_table": TABLE, "cu_seqlens_k": starts([3, -1])}, ["cu_seqlens_k is [0, 3, 2]", "never fall"]),
        (PAGES | {"block_table": TABLE, "cu_seqlens_k": starts([2, 3]) + 1}, ["cu_seqlens_k", "start with 0"]),
    ],
)
def test_varlen_misuse_is_refused(changes, words):
    arguments = {"q": torch.randn(6, 2, 8), "k": torch.randn(5, 2, 8), "v": torch.randn(5, 2, 8)}
    arguments |= {"cu_seqlens_q": starts([2, 4]), "cu_seqlens_k": starts([2, 3]), "max_seqlen_q": 4, "max_seqlen_k": 3}
    flash_attn_varlen_func(**arguments)
    with pytest.raises(InvalidArgumentError) as raised:
        flash_attn_varlen_func(**(arguments | changes))
    assert all(word in str(raised.value) for word in words), raised.value
