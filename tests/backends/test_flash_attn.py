"""The adapter to flash-attn, on a stand-in with flash-attn 2's signatures, layouts and meaning that runs anywhere."""

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from vllm_teach.attention.patterns import Banded, Causal, GlobalTokens, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import flash_attn
from vllm_teach.backends.conformance import ROWS, check_forward, check_gradients
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError

SPEC = AttentionSpec(2, 4, 4, 2, 2, 64, torch.float16, "cuda")
# Every row that the adapter serves in some dtype: on the stand-in the dtype does not matter.
SERVED = [row for row in ROWS if flash_attn.supports(replace(row.spec(), device="cuda", dtype=torch.float16)) is None]


@pytest.fixture
def fake_library(monkeypatch):
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
        assert dropout_p == 0.0
        assert not return_attn_probs
        assert q.shape[1] > 0
        assert k.shape[1] > 0
        module.calls.append("dense")
        return attend(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert dropout_p == 0.0
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        module.calls.append("varlen" if block_table is None else "paged")
        outs = []
        for i in range(len(cu_seqlens_q) - 1):
            keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
            if block_table is None:
                own_k, own_v = k[keys], v[keys]
            else:
                assert k.shape[1] % 256 == 0
                length = keys.stop - keys.start
                blocks = block_table[i, : -(-length // k.shape[1])]
                own_k, own_v = (cache[blocks].flatten(0, 1)[:length] for cache in (k, v))
            slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[i]
            own_q = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
            outs.append(
                attend(own_q[None], own_k[None], own_v[None], softmax_scale, causal, window_size, softcap, slopes)[0]
            )
        return torch.cat(outs)

    def attend(q, k, v, scale, causal, window_size, softcap, slopes):
        return naive_attention(
            q, k, v, scale=scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=slopes
        )

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.fixture
def anywhere(monkeypatch):
    """Serve CPU tensors of every dtype, as the stand-in can."""
    monkeypatch.setattr(flash_attn, "_DEVICE", "cpu")
    monkeypatch.setattr(flash_attn, "_DTYPES", (torch.float16, torch.bfloat16, torch.float32, torch.float64))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.name)
def test_arguments_reach_the_library(fake_library, row):
    check_forward(flash_attn.run, row)
    nothing = not any(q and kv for q, kv in row.lengths)
    assert fake_library.calls == ([] if nothing else [row.layout])


@pytest.mark.usefixtures("anywhere", "fake_library")
@pytest.mark.parametrize("row", [row for row in SERVED if row.has_gradients][::5], ids=lambda row: row.name)
def test_gradients_pass_through_it(row):
    check_gradients(flash_attn.run, row)


@pytest.mark.usefixtures("anywhere")
def test_an_absent_package_is_named(monkeypatch, make_qkv):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it raises ModuleNotFoundError
    assert "flash-attn is not installed" in flash_attn.unavailable()
    with pytest.raises(MissingDependencyError, match=r'pip install -e "\.\[flash\]" in the clone'):
        flash_attn.run(*make_qkv(4, 4))


@pytest.mark.usefixtures("fake_library")
def test_a_call_that_it_does_not_support_never_reaches_the_library(fake_library, make_qkv):
    with pytest.raises(InvalidArgumentError, match=r"^flash-attn runs on cuda, not on cpu\.$"):
        flash_attn.run(*make_qkv(4, 4))
    assert fake_library.calls == []


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
    [
        ({"device": "cpu"}, "cpu"),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 320}, "320"),
        ({"pattern": Causal() & GlobalTokens(2)}, "is neither"),
        ({"layout": "paged", "block_size": 128}, "multiple of 256, not 128"),
        ({"layout": "paged", "block_size": 256, "requires_grad": True}, "no backward pass through a paged cache"),
    ],
)
def test_calls_it_cannot_serve(change, word):
    assert flash_attn.supports(SPEC) is None
    assert word in flash_attn.supports(replace(SPEC, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": LocalWindow(2, 1) & Causal()},
        {"pattern": Banded(3)},
        {"layout": "paged", "block_size": 512},
        {"softcap": 30.0, "alibi": True, "requires_grad": True},
    ],
)
def test_calls_it_serves(change):
    assert flash_attn.supports(replace(SPEC, **change)) is None
