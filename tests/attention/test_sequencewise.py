import math
import random

import pytest
import torch

from vllm_teach.attention.layout import Paged, Varlen
from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.sequencewise import attend_sequences, sequence_calls
from vllm_teach.attention.tiled import flash_attention
from vllm_teach.errors import InvalidArgumentError

Q_LENS, KV_LENS = [3, 0, 5, 2, 1], [4, 3, 2, 0, 7]  # no queries; fewer keys than queries; no keys
ATTENTIONS = [naive_attention, flash_attention]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> torch.Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def draw(q_lens, kv_lens, q_heads=4, kv_heads=2, head_dim=8) -> list[torch.Tensor]:
    sizes = [(sum(q_lens), q_heads), (sum(kv_lens), kv_heads), (sum(kv_lens), kv_heads)]
    return [torch.randn(*size, head_dim, dtype=torch.float64) for size in sizes]


def paged_copy(k: torch.Tensor, v: torch.Tensor, kv_lens: list[int], block_size: int):
    """The same keys and values in blocks in a random order, between NaN; returns k, v, block_table."""
    needed = [-(-length // block_size) for length in kv_lens]
    order = random.Random(0).sample(range(sum(needed) + 3), sum(needed))
    table = torch.full((len(kv_lens), max(needed)), -1, dtype=torch.int32)
    caches = [torch.full((sum(needed) + 3, block_size, *k.shape[1:]), math.nan, dtype=k.dtype) for _ in range(2)]
    start = 0
    for i, length in enumerate(kv_lens):
        for t in range(length):
            if t % block_size == 0:
                table[i, t // block_size] = order.pop()
            for cache, flat in zip(caches, (k, v), strict=True):
                cache[table[i, t // block_size], t % block_size] = flat[start + t]
        start += length
    return *caches, table


def packed(q, k, v, *, sees, scale=None, slopes=None):
    """One dense call over all tokens: a query sees the keys of its own sequence that `sees(position, key)` shows it.

    Slopes `[sequences, q_heads]` make each score differ per sequence, which the dense call cannot: they are added here.
    """
    q_of = [(i, t) for i, n in enumerate(Q_LENS) for t in range(n)]
    k_of = [(i, t) for i, n in enumerate(KV_LENS) for t in range(n)]
    position = {(i, t): t + KV_LENS[i] - Q_LENS[i] for i, t in q_of}
    mask = torch.tensor([[a == i and sees(position[i, t], b) for a, b in k_of] for i, t in q_of])
    if slopes is None:
        return naive_attention(q[None], k[None], v[None], mask=mask, scale=scale)[0]
    distance = torch.tensor([[abs(position[i, t] - b) for _, b in k_of] for i, t in q_of]).double()
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * (scale or q.shape[-1] ** -0.5)
    scores = scores - slopes.double()[[i for i, _ in q_of]].T[:, :, None] * distance
    probs = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(2, dim=1))


MASKS = {
    "full": ({}, lambda position, key: True),
    "causal": ({"causal": True}, lambda position, key: key <= position),
    "window": ({"window_size": (1, 2)}, lambda position, key: position - 1 <= key <= position + 2),
    "pattern": (
        {"pattern": Causal() & ~LocalWindow(0, 0), "scale": 0.7},
        lambda position, key: key < position,
    ),
}


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_varlen_and_paged_equal_one_dense_call_over_all_tokens(attend, mask):
    arguments, sees = MASKS[mask]
    q, k, v = draw(Q_LENS, KV_LENS)
    expected = packed(q, k, v, sees=sees, scale=arguments.get("scale"))
    varlen = Varlen(starts(Q_LENS), starts(KV_LENS))
    torch.testing.assert_close(attend_sequences(attend, q, k, v, varlen, **arguments), expected, rtol=0, atol=1e-12)
    for block_size in (1, 3, 16):
        k_cache, v_cache, table = paged_copy(k, v, KV_LENS, block_size)
        out = attend_sequences(attend, q, k_cache, v_cache, Paged(starts(Q_LENS), table, int32(KV_LENS)), **arguments)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_each_sequence_gets_its_own_slopes(attend, rows):
    q, k, v = draw(Q_LENS, KV_LENS)
    slopes = torch.rand(5, 4) if rows == 5 else torch.rand(4)
    varlen = Varlen(starts(Q_LENS), starts(KV_LENS))
    out = attend_sequences(attend, q, k, v, varlen, causal=True, alibi_slopes=slopes)
    expected = packed(q, k, v, sees=MASKS["causal"][1], slopes=slopes.expand(5, 4))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_equal_lengths_are_a_batch_also_with_dropout(attend):
    q, k, v = draw([6] * 3, [9] * 3)
    batch = [t.unflatten(0, (3, -1)) for t in (q, k, v)]
    arguments = {"causal": True, "dropout_p": 0.4, "dropout_seed": 8, "softcap": 2.0, "alibi_slopes": torch.rand(3, 4)}
    expected = naive_attention(*batch, **arguments)
    out = attend_sequences(attend, q, k, v, Varlen(starts([6] * 3), starts([9] * 3)), **arguments)
    torch.testing.assert_close(out, expected.flatten(0, 1), rtol=0, atol=1e-12)


def test_one_seed_is_drawn_for_all_sequences():
    q, k, v = draw(Q_LENS, KV_LENS)
    calls = list(sequence_calls(q, k, v, Varlen(starts(Q_LENS), starts(KV_LENS)), dropout_p=0.5))
    assert len({call.arguments["dropout_seed"] for call in calls}) == 1
    assert [call.arguments["first_batch"] for call in calls] == [0, 1, 2, 3, 4]


def test_without_dropout_the_arguments_are_passed_on_as_they_came():
    q, k, v = draw(Q_LENS, KV_LENS)
    arguments = {"causal": True, "window_size": (3, 0), "softcap": 1.0}
    for call in sequence_calls(q, k, v, Varlen(starts(Q_LENS), starts(KV_LENS)), **arguments):
        assert call.arguments == arguments
        assert call.q.shape[0] == call.k.shape[0] == call.v.shape[0] == 1


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_gradients_reach_every_token(attend):
    q, k, v = [t.requires_grad_() for t in draw(Q_LENS, KV_LENS)]
    weights = torch.randn_like(q)
    expected = torch.autograd.grad((packed(q, k, v, sees=MASKS["causal"][1]) * weights).sum(), (q, k, v))
    varlen = Varlen(starts(Q_LENS), starts(KV_LENS))
    out = attend_sequences(attend, q, k, v, varlen, causal=True)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    k_cache, v_cache, table = paged_copy(k.detach(), v.detach(), KV_LENS, 3)
    caches = k_cache.requires_grad_(), v_cache.requires_grad_()
    out = attend_sequences(attend, q, *caches, Paged(starts(Q_LENS), table, int32(KV_LENS)), causal=True)
    dq, dk, dv = torch.autograd.grad((out * weights).sum(), (q, *caches))
    torch.testing.assert_close(dq, expected[0], rtol=0, atol=1e-12)
    for cache_grad, flat_grad in ((dk, expected[1]), (dv, expected[2])):
        assert cache_grad.isfinite().all()
        torch.testing.assert_close(cache_grad.abs().sum(), flat_grad.abs().sum(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_no_sequences_give_no_output(attend):
    q, k, v = draw([], [])
    out = attend_sequences(attend, q, k, v, Varlen(int32([0]), int32([0])))
    assert out.shape == (0, 4, 8)
    assert out.dtype == torch.float64


def test_arguments_are_checked_against_the_whole_call():
    q, k, v = draw(Q_LENS, KV_LENS)
    varlen = Varlen(starts(Q_LENS), starts(KV_LENS))
    with pytest.raises(InvalidArgumentError, match=r"alibi_slopes has .* \[4\] or \[5, 4\]\.$"):
        attend_sequences(naive_attention, q, k, v, varlen, alibi_slopes=torch.ones(3, 4))
    with pytest.raises(InvalidArgumentError, match=r"^cu_seqlens_q is"):
        attend_sequences(naive_attention, q[1:], k, v, varlen)
