import pytest
import torch

from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.tiled import flash_attention, flash_attention_forward
from vllm_teach.attention.tiled_backward import flash_attention_backward
from vllm_teach.errors import InvalidArgumentError

SLOPES = torch.tensor([[0.5, 0.25], [0.1, 0.4]])
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "pattern": {"pattern": Causal() | ~LocalWindow(4, 2)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES[0]},
    "alibi of each sequence": {"alibi_slopes": SLOPES},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "scale": {"scale": -0.4},
    "all": {
        "causal": True,
        "window_size": (5, -1),
        "softcap": 0.7,
        "alibi_slopes": SLOPES,
        "dropout_p": 0.3,
        "dropout_seed": 2**63 + 1,
        "scale": 0.6,
        "first_batch": 2,
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(make_qkv, feature):
    """Against differences of function values: an oracle that knows no derivative at all."""
    inputs = [t.requires_grad_() for t in make_qkv(q_len=3, kv_len=4, q_heads=2, kv_heads=1, head_dim=2)]

    def attend(*qkv):
        return flash_attention(*qkv, return_lse=True, tile_q=2, tile_k=3, **FEATURES[feature])

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 3), (4, 0), (0, 4)])
def test_gradcheck_with_rows_that_see_no_key(make_qkv, q_len, kv_len):
    inputs = [t.requires_grad_() for t in make_qkv(batch=1, q_len=q_len, kv_len=kv_len, head_dim=2)]
    assert torch.autograd.gradcheck(lambda *qkv: flash_attention(*qkv, causal=True, tile_q=4, tile_k=2), inputs)


def test_a_row_that_sees_no_key_gives_gradients_of_zero(make_qkv):
    inputs = [t.requires_grad_() for t in make_qkv(q_len=6, kv_len=4)]
    out, lse = flash_attention(*inputs, causal=True, return_lse=True, tile_q=4, tile_k=4)
    loss = (out * torch.randn_like(out)).sum() + lse[..., 2:].sum()
    dq, dk, dv = torch.autograd.grad(loss, inputs)
    assert (dq[:, :2] == 0).all()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


def gradients(attend, inputs, dout, **arguments):
    return torch.autograd.grad(attend(*inputs, **arguments), inputs, dout)


def test_the_tiles_do_not_matter_and_may_differ_from_the_forwards(make_qkv):
    q, k, v = make_qkv(q_len=23, kv_len=31, q_heads=2, kv_heads=1)
    arguments = FEATURES["all"]
    out, lse = flash_attention_forward(q, k, v, tile_q=5, tile_k=7, **arguments)
    dout = torch.randn_like(out)
    expected = flash_attention_backward(dout, q, k, v, out, lse, tile_q=128, tile_k=128, **arguments)
    for tile_q, tile_k in ((1, 31), (23, 1), (8, 8), (64, 5)):
        found = flash_attention_backward(dout, q, k, v, out, lse, tile_q=tile_q, tile_k=tile_k, **arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_each_result_may_be_used_alone(make_qkv):
    inputs = [t.requires_grad_() for t in make_qkv(q_len=9, kv_len=11)]
    weights = torch.randn(2, 2, 9, dtype=torch.float64)
    for index in (0, 1):

        def loss(attend, index=index, **tiles):
            result = attend(*inputs, return_lse=True, **tiles)[index]
            return (result * (weights if index else weights.transpose(1, 2)[..., None])).sum()

        found = torch.autograd.grad(loss(flash_attention, tile_q=4, tile_k=4), inputs, materialize_grads=True)
        expected = torch.autograd.grad(loss(naive_attention), inputs, materialize_grads=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_gradients_of_any_strides_are_taken_and_nothing_is_changed(make_qkv):
    inputs = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in make_qkv(q_len=20, kv_len=20)]
    before = [t.detach().clone() for t in inputs]
    expanded = torch.randn(1, 20, 1, 1, dtype=torch.float64).expand(2, 20, 2, 8)  # as the gradient of a sum is
    found = gradients(flash_attention, inputs, expanded, causal=True, tile_q=8, tile_k=8)
    torch.testing.assert_close(found, gradients(naive_attention, inputs, expanded, causal=True), rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_only_what_needs_a_gradient_gets_one(make_qkv):
    q, k, v = make_qkv()
    k.requires_grad_()
    flash_attention(q, k, v).sum().backward()
    assert (q.grad, v.grad) == (None, None)
    expected = torch.autograd.grad(naive_attention(q, k, v).sum(), k)[0]
    torch.testing.assert_close(k.grad, expected, rtol=0, atol=1e-12)


def test_it_keeps_q_k_v_out_and_lse_and_nothing_else(make_qkv):
    q, k, v = (t.requires_grad_() for t in make_qkv(q_len=40, kv_len=50))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, lse = flash_attention(
            q, k, v, return_lse=True, causal=True, dropout_p=0.5, softcap=2.0, tile_q=8, tile_k=8
        )
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (q, k, v, out, lse)]


def test_the_same_call_gives_the_same_bits(make_qkv):
    inputs = [t.float().requires_grad_() for t in make_qkv(q_len=50, kv_len=60)]
    dout = torch.randn(2, 50, 2, 8)
    first, second = (gradients(flash_attention, inputs, dout, **FEATURES["dropout"], tile_q=16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_backward_pass_drops_what_the_forward_dropped_without_a_seed_too(make_qkv):
    """With q = 0 all probabilities are equal, so dv shows how many queries kept each key, and out which keys."""
    q, k, v = make_qkv(batch=1, q_len=1, kv_len=6, q_heads=1, kv_heads=1, head_dim=6)
    v = torch.eye(6, dtype=torch.float64).view(1, 6, 1, 6).requires_grad_()
    for _ in range(5):
        out = flash_attention(torch.zeros_like(q), k, v, dropout_p=0.5, tile_k=4)
        (dv,) = torch.autograd.grad(out.sum(), v)
        torch.testing.assert_close(dv[0, :, 0, 0], out[0, 0, 0].detach())


def test_it_cannot_be_differentiated_twice(make_qkv):
    """Also where the incoming gradient is a constant: PyTorch's once_differentiable would drop the second order."""
    inputs = [t.requires_grad_() for t in make_qkv()]
    with pytest.raises(InvalidArgumentError, match=r"^create_graph is True; .* naive_attention\.$"):
        torch.autograd.grad(flash_attention(*inputs).sum(), inputs, create_graph=True)


def test_autograd_through_the_forwards_loop_is_right_and_keeps_every_tile(make_qkv, peak_bytes):
    inputs = [t.requires_grad_() for t in make_qkv(q_len=30, kv_len=30, q_heads=4)]
    dout = torch.randn(2, 30, 4, 8, dtype=torch.float64)

    def through_the_loop(*qkv, **arguments):
        return flash_attention_forward(*qkv, **arguments)[0]

    arguments = {"causal": True, "tile_q": 8, "tile_k": 8}
    found = gradients(through_the_loop, inputs, dout, **arguments)
    torch.testing.assert_close(found, gradients(flash_attention, inputs, dout, **arguments), rtol=0, atol=1e-12)
    long = [torch.randn(1, 768, 1, 8, requires_grad=True) for _ in range(3)]
    tiles = {"tile_q": 64, "tile_k": 64}
    assert peak_bytes(lambda: through_the_loop(*long, **tiles)) > 768 * 768 * 4  # P, in pieces
    assert peak_bytes(lambda: flash_attention(*long, **tiles)) < 768 * 768 * 4 / 4


def test_autocast_does_not_lower_the_precision(make_qkv):
    inputs = [t.float().requires_grad_() for t in make_qkv(q_len=40, kv_len=40)]
    dout = torch.randn(2, 40, 2, 8)
    expected = flash_attention(*inputs, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attention(*inputs, causal=True)
        found = torch.autograd.grad(out, inputs, dout)
        assert torch.equal(flash_attention_forward(*inputs, causal=True)[0], out)
        assert (inputs[0][0, 0] @ inputs[0][0, 0].T).dtype == torch.bfloat16  # still on out here
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(expected, inputs, dout), strict=True))


def test_slopes_that_require_a_gradient_are_refused(make_qkv):
    q, k, v = make_qkv()
    with pytest.raises(InvalidArgumentError, match=r"^alibi_slopes requires a gradient; .*\.$"):
        flash_attention(q, k, v, alibi_slopes=torch.ones(2, requires_grad=True))


def test_dropout_without_its_seed_is_refused(make_qkv):
    q, k, v = make_qkv()
    out, lse = flash_attention_forward(q, k, v, dropout_p=0.5)
    with pytest.raises(InvalidArgumentError, match=r"^dropout_seed is None; .*\.$"):
        flash_attention_backward(out, q, k, v, out, lse, dropout_p=0.5)


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_a_result_or_gradient_of_another_shape_is_refused(make_qkv, name):
    q, k, v = make_qkv(q_len=5)
    out, lse = flash_attention_forward(q, k, v)
    tensors = {"dout": out, "out": out, "lse": lse, "dlse": lse}
    tensors[name] = tensors[name][:1]
    wanted = r"\[2, 2, 5\]" if "lse" in name else r"\[2, 5, 2, 8\]"
    with pytest.raises(InvalidArgumentError, match=rf"^{name} has shape .* must be {wanted}\.$"):
        flash_attention_backward(tensors["dout"], q, k, v, tensors["out"], tensors["lse"], dlse=tensors["dlse"])


def test_large_logits_give_finite_gradients(make_qkv):
    q, k, v = make_qkv(q_len=40, kv_len=40, head_dim=16)
    inputs = [(q * 1e4).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    dout = torch.randn(2, 40, 2, 16, dtype=torch.float64)
    exact = gradients(naive_attention, inputs, dout, causal=True)
    found = gradients(flash_attention, inputs, dout, causal=True, tile_q=16, tile_k=8)
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-8)
    low = gradients(flash_attention, [t.detach().float().requires_grad_() for t in inputs], dout.float(), causal=True)
    assert all(t.isfinite().all() for t in low)


def test_empty_tiles_are_not_computed_and_full_ones_not_masked(make_qkv, monkeypatch):
    """Counted where the scores of a tile are made: forward and backward visit what the tile map says."""
    q, k, v = (t.requires_grad_() for t in make_qkv(q_len=64, kv_len=64))
    pattern, masked = LocalWindow(20, 0), []
    tile_mask = LocalWindow.tile_mask
    monkeypatch.setattr(LocalWindow, "tile_mask", lambda *args: masked.append(args[1:3]) or tile_mask(*args))
    flash_attention(q, k, v, pattern=pattern, tile_q=8, tile_k=4).sum().backward()
    kinds = pattern.tile_map(64, 64, 8, 4)
    assert (kinds == 0).any()
    assert (kinds == 2).any()
    partial = [((8 * i, 8 * i + 8), (4 * j, 4 * j + 4)) for i, j in (kinds == 1).nonzero().tolist()]
    assert sorted(masked) == sorted(partial * 2)  # once in each pass


def test_peak_memory_grows_linearly_forward_and_backward(peak_bytes, loglog_slope):
    lengths = [512, 1024, 2048]
    peaks = []
    for n in lengths:
        inputs = [torch.randn(1, n, 1, 64, requires_grad=True) for _ in range(3)]
        dout = torch.randn(1, n, 1, 64)
        peaks.append(peak_bytes(lambda inputs=inputs, dout=dout: gradients(flash_attention, inputs, dout, causal=True)))
    print(f"tiled, forward and backward: {peaks} bytes at {lengths}, slope {loglog_slope(lengths, peaks):.2f}")
    # What must be there at the end: out and lse, their copies for D, dq, dk, dv. What may be: a constant of tiles.
    slope = (peaks[-1] - peaks[-2]) / (lengths[-1] - lengths[-2])
    assert slope == pytest.approx((peaks[-2] - peaks[-3]) / (lengths[-2] - lengths[-3]), rel=0.02)
    assert slope <= 6 * 64 * 4 + 4 * 4


def test_at_4096_tokens_forward_and_backward_hold_a_tenth_of_what_naives_forward_holds(peak_bytes):
    """Naive's backward pass holds more still: P is kept, and dP and dS are as large."""
    inputs = [torch.randn(1, 4096, 8, 64, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, 4096, 8, 64)

    def forward(attend):
        with torch.no_grad():
            return attend(*inputs, causal=True)

    naive = peak_bytes(lambda: forward(naive_attention))
    ours = peak_bytes(lambda: forward(flash_attention))
    with_backward = peak_bytes(lambda: gradients(flash_attention, inputs, dout, causal=True))
    print(f"naive forward {naive:,} B, tiled forward {ours:,} B, tiled forward and backward {with_backward:,} B")
    assert naive >= 2 * 8 * 4096**2 * 4
    assert ours * 10 <= naive
    assert with_backward * 10 <= naive


def test_naives_backward_holds_more_than_its_forward(peak_bytes):
    inputs = [torch.randn(1, 512, 2, 64, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, 512, 2, 64)
    matrix = 2 * 512**2 * 4
    peak = peak_bytes(lambda: gradients(naive_attention, inputs, dout, causal=True))
    assert 3 * matrix <= peak < 4.2 * matrix  # P, dP and dS, the mask, and what is linear in n


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dout": None}, r"^dout is of type NoneType; give a tensor \[2, 7, 2, 8\]\."),
        ({"out": [1.0]}, r"^out is of type list"),
        ({"dout": torch.ones(2, 7, 2, 8).long()}, r"^dout has dtype torch.int64 on cpu and q torch.float64 on cpu;"),
        ({"lse": torch.ones(2, 2, 7, device="meta")}, r"^lse has dtype torch.float32 on meta"),
        ({"lse": None}, r"^lse is of type NoneType"),
        ({"dlse": "x"}, r"^dlse is of type str"),
        ({"dout": torch.ones(2, 7, 2, 8).to_sparse()}, r"^dout is of layout torch.sparse_coo;"),
        ({"dropout_p": "x"}, r"^dropout_p is of type str"),
        ({"dropout_p": 0.5}, r"^dropout_seed is None;"),
    ],
)
def test_gradients_that_cannot_be_are_refused_by_name(make_qkv, changes, message):
    q, k, v = make_qkv()
    out, lse = flash_attention_forward(q, k, v)
    arguments = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        flash_attention_backward(**arguments)
