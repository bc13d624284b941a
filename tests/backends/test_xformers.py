import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import xformers
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError

SPEC = AttentionSpec(2, 4, 4, 2, 2, 64, torch.float16, "cuda")


class LowerTriangularFromBottomRightMask:
    """Stands for xFormers' class of this name."""


@pytest.fixture
def fake_library(monkeypatch):
    """xformers.ops with xFormers' signature, its layouts BMHK and BMGHK, and its meaning, on any device."""
    ops = ModuleType("xformers.ops")
    ops.calls = []

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
        assert p == 0.0
        assert attn_bias is None or isinstance(attn_bias, LowerTriangularFromBottomRightMask)
        assert query.shape[1] > 0
        assert key.shape[1] > 0
        ops.calls.append((query.shape, key.stride()))
        causal = attn_bias is not None
        if query.dim() == 4:
            assert query.shape[2] == key.shape[2]  # four dimensions mean as many heads in k as in q
            return naive_attention(query, key, value, causal=causal, scale=scale)
        assert query.shape[2:] == key.shape[2:]  # five mean G groups of H heads, in each of q, k and v
        groups = [
            naive_attention(query[:, :, g], key[:, :, g], value[:, :, g], causal=causal, scale=scale)
            for g in range(query.shape[2])
        ]
        return torch.stack(groups, dim=2)

    ops.memory_efficient_attention = memory_efficient_attention
    bias = SimpleNamespace(LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask)
    ops.fmha = SimpleNamespace(attn_bias=bias)
    package = ModuleType("xformers")
    package.ops = ops
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    return ops


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (4, 1)], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 8), (1, 8), (3, 8), (8, 3), (3, 0), (0, 3)])
def test_arguments_reach_the_library(fake_library, make_qkv, q_len, kv_len, heads, causal, scale):
    q, k, v = make_qkv(q_len, kv_len, *heads)
    expected = naive_attention(q, k, v, causal=causal, scale=scale)
    torch.testing.assert_close(xformers.run(q, k, v, causal=causal, scale=scale), expected, rtol=0, atol=1e-12)
    assert len(fake_library.calls) == (1 if q_len and kv_len else 0)


def test_shared_heads_are_not_copied(fake_library, make_qkv):
    xformers.run(*make_qkv(4, 4, 9, 3))
    (query_shape, key_strides) = fake_library.calls[0]
    assert query_shape == (2, 4, 3, 3, 16)
    assert key_strides[3] == 0


def test_an_absent_package_is_named(monkeypatch, make_qkv):
    monkeypatch.setitem(sys.modules, "xformers", None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "xformers.ops", raising=False)
    assert "xformers is not installed" in xformers.unavailable()
    with pytest.raises(MissingDependencyError, match=r"pip install 'vllm-teach\[gpu\]'"):
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
    ],
    ids=str,
)
def test_calls_it_cannot_serve(change, word):
    assert xformers.supports(SPEC) is None
    assert word in xformers.supports(replace(SPEC, **change))


def test_head_sizes_that_its_kernels_load_whole_are_served():
    assert xformers.supports(replace(SPEC, head_dim=72)) is None
    assert xformers.supports(replace(SPEC, head_dim=100, dtype=torch.float32)) is None
    assert xformers.supports(replace(SPEC, head_dim=512)) is None
