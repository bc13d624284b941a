"""The adapter to xFormers, on a stand-in: this project's own implementation of xFormers' interface and biases."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_teach.attention import attn_bias
from vllm_teach.attention.memory_efficient import memory_efficient_attention
from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow
from vllm_teach.backends import xformers
from vllm_teach.backends.conformance import ROWS, check_forward, check_gradients
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError

SPEC = AttentionSpec(2, 4, 4, 2, 2, 64, torch.float16, "cuda")
SERVED = [row for row in ROWS if xformers.supports(replace(row.spec(), device="cuda", dtype=torch.float16)) is None]


@pytest.fixture
def fake_library(monkeypatch):
    ops = ModuleType("xformers.ops")
    ops.calls = []

    def attend(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
        assert p == 0.0
        assert query.shape[1] > 0
        assert key.shape[1] > 0
        assert attn_bias is None or type(attn_bias).__name__.startswith(
            ("LowerTriangularFromBottomRight", "LocalAttentionFromBottomRight", "BlockDiagonal")
        )
        ops.calls.append((query.shape, key.stride(), type(attn_bias).__name__))
        return memory_efficient_attention(query, key, value, attn_bias, scale=scale)

    ops.memory_efficient_attention = attend
    ops.fmha = SimpleNamespace(attn_bias=attn_bias)
    package = ModuleType("xformers")
    package.ops = ops
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    return ops


@pytest.fixture
def anywhere(monkeypatch):
    """Serve CPU tensors of every dtype, as the stand-in can."""
    monkeypatch.setattr(xformers, "_DEVICE", "cpu")
    sizes = {torch.float64: 1, torch.float32: 1, torch.float16: 1, torch.bfloat16: 1}
    monkeypatch.setattr(xformers, "_HEAD_DIM_MULTIPLE", sizes)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.name)
def test_arguments_reach_the_library(fake_library, row, monkeypatch):
    monkeypatch.setattr(xformers, "_no_such_mask", lambda spec: None)  # its two-sided windows are for 16 bits alone
    check_forward(xformers.run, row)
    nothing = not any(q and kv for q, kv in row.lengths)
    assert len(fake_library.calls) == (0 if nothing else 1)


@pytest.mark.usefixtures("anywhere", "fake_library")
@pytest.mark.parametrize("row", [row for row in SERVED if row.has_gradients][::5], ids=lambda row: row.name)
def test_gradients_pass_through_it(row, monkeypatch):
    monkeypatch.setattr(xformers, "_no_such_mask", lambda spec: None)
    check_gradients(xformers.run, row)


@pytest.mark.usefixtures("anywhere")
def test_shared_heads_are_not_copied(fake_library, make_qkv):
    xformers.run(*make_qkv(4, 4, 9, 3))
    query_shape, key_strides, _ = fake_library.calls[0]
    assert query_shape == (2, 4, 3, 3, 16)
    assert key_strides[3] == 0


@pytest.mark.usefixtures("anywhere")
def test_a_window_is_counted_with_the_querys_own_key(fake_library, make_qkv):
    q, k, v = make_qkv(9, 9)
    xformers.run(q, k, v, window_size=(2, 0))
    assert fake_library.calls[0][2] == "LowerTriangularFromBottomRightLocalAttentionMask"
    bias = xformers._dense_bias(sys.modules["xformers.ops"], (2, 0))
    assert (bias.materialize((9, 9)) == 0).sum(dim=1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]


@pytest.mark.usefixtures("anywhere")
def test_an_absent_package_is_named(monkeypatch, make_qkv):
    monkeypatch.setitem(sys.modules, "xformers", None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "xformers.ops", raising=False)
    assert "xformers is not installed" in xformers.unavailable()
    with pytest.raises(MissingDependencyError, match=r'pip install -e "\.\[gpu\]" in the clone'):
        xformers.run(*make_qkv(4, 4))


@pytest.mark.usefixtures("fake_library")
def test_the_machine_is_asked_for_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in xformers.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert xformers.unavailable() is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": "cpu"}, "cpu"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 60}, "multiples of 8 as head_dim, not 60"),
        ({"head_dim": 100, "dtype": torch.bfloat16}, "multiples of 8 as head_dim, not 100"),
        ({"head_dim": 66, "dtype": torch.float32}, "multiples of 4 as head_dim, not 66"),
        ({"pattern": Causal() & GlobalTokens(2)}, "is neither"),
        ({"pattern": LocalWindow(1, 1), "dtype": torch.float32}, "1 keys to the left and 1 to the right"),
        ({"pattern": LocalWindow(1, 1), "layout": "varlen"}, "1 keys to the left and 1 to the right"),
        ({"layout": "paged", "block_size": 16}, "paged caches"),
    ],
    ids=str,
)
def test_calls_it_cannot_serve(change, word):
    assert xformers.supports(SPEC) is None
    assert word in xformers.supports(replace(SPEC, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 72},
        {"head_dim": 100, "dtype": torch.float32},
        {"head_dim": 512},
        {"pattern": LocalWindow(1, 1)},
        {"pattern": LocalWindow(1, 0), "q_len": 1},
        {"pattern": LocalWindow(2, 0), "layout": "varlen", "requires_grad": True},
    ],
    ids=str,
)
def test_calls_it_serves(change):
    assert xformers.supports(replace(SPEC, **change)) is None
