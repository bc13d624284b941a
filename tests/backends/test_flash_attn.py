import importlib
import sys
from types import ModuleType

import pytest
import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import flash_attn
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import MissingDependencyError

SPEC = AttentionSpec(2, 4, 4, 2, 2, 64, torch.float16, "cuda")


@pytest.fixture
def fake_library(monkeypatch):
    """flash_attn with flash-attn 2's signature, its layout and its meaning, on any device."""
    module = ModuleType("flash_attn")
    module.calls = []

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        assert (dropout_p, window_size, softcap, alibi_slopes) == (0.0, (-1, -1), 0.0, None)
        assert not return_attn_probs
        assert q.shape[1] > 0
        assert k.shape[1] > 0
        module.calls.append((q.shape, k.shape))
        return naive_attention(q, k, v, causal=causal, scale=softmax_scale)

    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 8), (1, 8), (3, 8), (8, 3), (3, 0), (0, 3)])
def test_arguments_reach_the_library(fake_library, make_qkv, q_len, kv_len, causal, scale):
    q, k, v = make_qkv(q_len, kv_len, 9, 3)
    expected = naive_attention(q, k, v, causal=causal, scale=scale)
    torch.testing.assert_close(flash_attn.run(q, k, v, causal=causal, scale=scale), expected, rtol=0, atol=1e-12)
    assert len(fake_library.calls) == (1 if q_len and kv_len else 0)


def test_an_absent_package_is_named(monkeypatch, make_qkv):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it raises ModuleNotFoundError
    assert "flash-attn is not installed" in flash_attn.unavailable()
    with pytest.raises(MissingDependencyError, match=r"pip install 'vllm-teach\[flash\]'"):
        flash_attn.run(*make_qkv(4, 4))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("undefined symbol: _ZN3c10"), "installed but does not load .undefined symbol: _ZN3c10"),
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "installed, but lacks einops"),
    ],
)
def test_a_broken_package_is_told_from_an_absent_one(monkeypatch, error, words):
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingDependencyError, match=words):
        flash_attn._library()
    monkeypatch.undo()


@pytest.mark.usefixtures("fake_library")
def test_the_machine_is_asked_for_a_gpu_and_its_generation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in flash_attn.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "compute capability 7.5" in flash_attn.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert flash_attn.unavailable() is None


@pytest.mark.parametrize(
    ("change", "word"),
    [({"device": "cpu"}, "cpu"), ({"dtype": torch.float32}, "float32"), ({"head_dim": 320}, "320")],
)
def test_calls_it_cannot_serve(change, word):
    assert flash_attn.supports(SPEC) is None
    assert word in flash_attn.supports(AttentionSpec(**{**vars(SPEC), **change}))
