import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_teach.attention.dropout import keep_mask
from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.errors import InvalidArgumentError


def attention_by_hand(
    q, k, v, *, causal=False, scale=None, softcap=0.0, slopes=None, sees=lambda q_pos, j: True, kept=None, dropout_p=0.0
):
    """Plain Python floats and loops, straight from the definition: shares nothing with the package.

    `sees` says whether a query at a position sees key j; `slopes` are [batch][head]; `kept` is [batch][head][i][j].
    """
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(batch, q_len, q_heads, head_dim, dtype=torch.float64)
    lse = torch.full((batch, q_heads, q_len), -math.inf, dtype=torch.float64)
    q, k, v = q.tolist(), k.tolist(), v.tolist()

    def score(b, h, g, i, j):
        s = scale * sum(x * y for x, y in zip(q[b][i][h], k[b][j][g], strict=True))
        s = softcap * math.tanh(s / softcap) if softcap else s
        return s - (slopes[b][h] if slopes else 0) * abs(i + kv_len - q_len - j)

    for b in range(batch):
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            for i in range(q_len):
                position = i + kv_len - q_len
                keys = [j for j in range(kv_len) if (not causal or j <= position) and sees(position, j)]
                if not keys:
                    continue
                weights = [math.exp(score(b, h, g, i, j)) for j in keys]
                total = sum(weights)
                lse[b, h, i] = math.log(total)
                if kept is not None:
                    weights = [w * kept[b][h][i][j] / (1 - dropout_p) for w, j in zip(weights, keys, strict=True)]
                for d in range(head_dim):
                    out[b, i, h, d] = sum(w * v[b][j][g][d] for w, j in zip(weights, keys, strict=True)) / total
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len", "q_heads", "kv_heads"), [(4, 4, 2, 2), (3, 6, 9, 3), (6, 3, 4, 1)])
def test_it_is_the_definition(make_qkv, q_len, kv_len, q_heads, kv_heads, causal):
    q, k, v = make_qkv(q_len=q_len, kv_len=kv_len, q_heads=q_heads, kv_heads=kv_heads, head_dim=3)
    out, lse = naive_attention(q, k, v, causal=causal, scale=0.7, return_lse=True)
    expected_out, expected_lse = attention_by_hand(q, k, v, causal=causal, scale=0.7)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


SLOPES = torch.tensor([[0.5, 0.25, 0.125, 1.0], [0.1, 0.2, 0.3, 0.4]])
VARIANTS = {
    "window": ({"window_size": (2, 1)}, {"sees": lambda q_pos, j: q_pos - 2 <= j <= q_pos + 1}),
    "causal window": ({"causal": True, "window_size": (1, -1)}, {"sees": lambda q_pos, j: q_pos - 1 <= j <= q_pos}),
    "pattern": (
        {"pattern": ~LocalWindow(1, 0) & Causal()},
        {"sees": lambda q_pos, j: j < q_pos - 1},
    ),
    "causal pattern": (
        {"causal": True, "pattern": ~LocalWindow(1, 0)},
        {"sees": lambda q_pos, j: j < q_pos - 1},
    ),
    "softcap": ({"softcap": 0.8}, {"softcap": 0.8}),
    "alibi": ({"alibi_slopes": SLOPES[0]}, {"slopes": [SLOPES[0].tolist()] * 2}),
    "alibi of each sequence": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES.tolist()}),
    "softcap, then alibi": (
        {"softcap": 0.8, "alibi_slopes": SLOPES, "causal": True},
        {"softcap": 0.8, "slopes": SLOPES.tolist(), "causal": True},
    ),
}


@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_is_its_definition(make_qkv, name, q_len, kv_len):
    q, k, v = make_qkv(q_len=q_len, kv_len=kv_len, q_heads=4, kv_heads=2, head_dim=3)
    ours, by_hand = VARIANTS[name]
    out, lse = naive_attention(q, k, v, scale=1.3, return_lse=True, **ours)
    expected_out, expected_lse = attention_by_hand(q, k, v, scale=1.3, **by_hand)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first_batch", [0, 3])
def test_dropout_drops_what_its_mask_says(make_qkv, first_batch):
    q, k, v = make_qkv(q_len=5, kv_len=6, q_heads=4, kv_heads=2, head_dim=3)
    heads = torch.arange(2 * 4) + 4 * first_batch
    kept = keep_mask(99, 0.4, heads, (0, 5), (0, 6)).view(2, 4, 5, 6)
    out, lse, probs = naive_attention(
        q,
        k,
        v,
        causal=True,
        dropout_p=0.4,
        dropout_seed=99,
        first_batch=first_batch,
        return_lse=True,
        return_probs=True,
    )
    expected_out, expected_lse = attention_by_hand(q, k, v, causal=True, kept=kept.tolist(), dropout_p=0.4)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)
    visible = torch.ones(5, 6, dtype=torch.bool).tril(1)
    assert torch.equal(probs > 0, kept & visible)  # P as it meets v


def test_without_a_seed_each_call_drops_others(make_qkv):
    q, k, v = make_qkv()
    first, second = (naive_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(naive_attention(q, k, v, dropout_p=0.5), first)


def test_dropout_is_right_on_average(make_qkv):
    q, k, v = make_qkv(batch=1)
    outs = torch.stack([naive_attention(q, k, v, dropout_p=0.3, dropout_seed=seed) for seed in range(400)])
    error = (outs.mean(dim=0) - naive_attention(q, k, v)).abs() / (outs.std(dim=0) / 20)  # in standard errors
    assert error.max() < 5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 33), (17, 40), (1, 29)])
def test_it_equals_pytorchs_math_attention(make_qkv, q_len, kv_len, causal):
    q, k, v = make_qkv(q_len=q_len, kv_len=kv_len, q_heads=6, kv_heads=2, head_dim=16)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len) if causal else None
    q_, k_, v_ = q.transpose(1, 2), *(t.repeat_interleave(3, dim=2).transpose(1, 2) for t in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(naive_attention(q, k, v, causal=causal), expected, rtol=0, atol=1e-12)


def test_returned_values_and_their_order(make_qkv):
    q, k, v = make_qkv(q_len=3, kv_len=5, q_heads=4, kv_heads=2)
    out = naive_attention(q, k, v)
    with_lse = naive_attention(q, k, v, return_lse=True)
    with_probs = naive_attention(q, k, v, return_probs=True)
    everything = naive_attention(q, k, v, return_lse=True, return_probs=True)
    assert out.shape == (2, 3, 4, 8)
    assert [t.shape for t in with_lse] == [(2, 3, 4, 8), (2, 4, 3)]
    assert [t.shape for t in with_probs] == [(2, 3, 4, 8), (2, 4, 3, 5)]
    assert [t.shape for t in everything] == [(2, 3, 4, 8), (2, 4, 3), (2, 4, 3, 5)]
    torch.testing.assert_close(with_probs[1].sum(-1), torch.ones(2, 4, 3, dtype=torch.float64))


def test_a_mask_hides_and_combines_with_causal(make_qkv):
    q, k, v = make_qkv(q_len=4, kv_len=6)
    mask = torch.ones(6, dtype=torch.bool)
    mask[2] = False
    _, probs = naive_attention(q, k, v, mask=mask, causal=True, return_probs=True)
    seen = (probs > 0).all(dim=0).all(dim=0)
    assert seen.tolist() == [
        [True, True, False, False, False, False],
        [True, True, False, True, False, False],
        [True, True, False, True, True, False],
        [True, True, False, True, True, True],
    ]


def test_a_row_that_sees_no_key_gives_zero_and_minus_infinity(make_qkv):
    q, k, v = make_qkv(q_len=5, kv_len=3)
    out, lse, probs = naive_attention(q, k, v, causal=True, return_lse=True, return_probs=True)
    assert (out[:, :2] == 0).all()
    assert (lse[:, :, :2] == -math.inf).all()
    assert (probs[:, :, :2] == 0).all()
    assert lse[:, :, 2:].isfinite().all()
    hidden = naive_attention(q, k, v, mask=torch.zeros(1, 1, 5, 3, dtype=torch.bool))
    assert (hidden == 0).all()


def test_no_keys_and_no_queries(make_qkv):
    q, k, v = make_qkv(q_len=3, kv_len=0)
    out, lse = naive_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    q, k, v = make_qkv(q_len=0, kv_len=3)
    out, lse = naive_attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (2, 2, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_the_inputs_dtype(make_qkv, dtype):
    results = naive_attention(*make_qkv(dtype=dtype), return_lse=True, return_probs=True)
    assert {t.dtype for t in results} == {dtype}


def test_float16_scores_overflow_because_nothing_is_upcast():
    q = k = torch.full((1, 2, 1, 64), 40.0, dtype=torch.float16)  # q . k = 64 * 1600 = 102,400 > 65,504
    v = torch.ones_like(q)
    assert naive_attention(q, k, v).isnan().all()
    assert (naive_attention(q.float(), k.float(), v.float()) == 1).all()


def test_a_nan_in_the_input_stays_visible(make_qkv):
    q, k, v = make_qkv()
    q[0, 3] = math.nan
    out = naive_attention(q, k, v, causal=True)
    assert out[0, 3].isnan().all()
    assert out[0, 2].isfinite().all()


FEATURES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_autograd_differentiates_it(make_qkv, feature):
    q, k, v = make_qkv(q_len=3, kv_len=4, q_heads=4, kv_heads=2, head_dim=2)
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def both(*qkv):
        return naive_attention(*qkv, return_lse=True, return_probs=True, **FEATURES[feature])

    assert torch.autograd.gradcheck(both, inputs)


@pytest.mark.parametrize("results", ["out", "lse", "probs"])
@pytest.mark.parametrize(("q_len", "kv_len", "blind"), [(5, 3, 2), (3, 0, 3)])
def test_a_row_that_sees_no_key_gives_gradients_of_zero(make_qkv, q_len, kv_len, blind, results):
    inputs = [t.requires_grad_() for t in make_qkv(q_len=q_len, kv_len=kv_len)]
    out, lse, probs = naive_attention(*inputs, causal=True, return_lse=True, return_probs=True)
    result = {"out": out, "lse": lse[..., blind:], "probs": probs}[results]
    dq, *dkv = torch.autograd.grad((result * torch.randn_like(result)).sum(), inputs, materialize_grads=True)
    assert (dq[:, :blind] == 0).all()
    assert all(t.isfinite().all() for t in (dq, *dkv))
    seeing = [t[:, blind:].detach().requires_grad_() if t is inputs[0] else t.detach().requires_grad_() for t in inputs]
    if kv_len and results == "out":  # the other rows get what they would get without it
        torch.manual_seed(1)
        weights = torch.randn_like(out)
        with_blind = torch.autograd.grad((naive_attention(*inputs, causal=True) * weights).sum(), inputs)
        without = torch.autograd.grad((naive_attention(*seeing, causal=True) * weights[:, blind:]).sum(), seeing)
        torch.testing.assert_close(with_blind[0][:, blind:], without[0])
        torch.testing.assert_close(with_blind[1:], without[1:])


def test_an_unknown_argument_is_refused(make_qkv):
    with pytest.raises(TypeError, match="is_causal"):
        naive_attention(*make_qkv(), is_causal=True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [(torch.ones(7, 7), ["float32"]), (torch.ones(6, 7, dtype=torch.bool), ["[6, 7]", "(2, 2, 7, 7)"])],
)
def test_a_wrong_mask_is_refused(make_qkv, mask, words):
    with pytest.raises(InvalidArgumentError, match="mask") as raised:
        naive_attention(*make_qkv(), mask=mask)
    assert all(word in str(raised.value) for word in words)
