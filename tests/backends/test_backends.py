"""What every backend promises, checked on each one that runs here."""

import subprocess
import sys

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

ALWAYS = ["naive", "tiled", "sdpa"]


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (4, 1)], ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(150, 150), (1, 150), (1, 1), (40, 150), (150, 40), (5, 1), (3, 0), (0, 3)]
)
@pytest.mark.parametrize("name", ALWAYS)
def test_it_equals_the_formula(make_qkv, name, q_len, kv_len, heads):
    q, k, v = make_qkv(q_len, kv_len, *heads)
    for arguments in ({"causal": False}, {"causal": True}, {"causal": True, "scale": 0.3}):
        out = backends.get(name).run(q, k, v, **arguments)
        torch.testing.assert_close(out, naive_attention(q, k, v, **arguments), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALWAYS)
def test_it_keeps_the_dtype(make_qkv, name, dtype):
    q, k, v = make_qkv(20, 30, 9, 3, dtype)
    out = backends.get(name).run(q, k, v, causal=True)
    exact = naive_attention(q.double(), k.double(), v.double(), causal=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_run_with_lse(make_qkv, name):
    q, k, v = make_qkv(20, 12)
    out, lse = backends.get(name).run_with_lse(q, k, v, causal=True, scale=0.5)
    expected_out, expected_lse = naive_attention(q, k, v, causal=True, scale=0.5, return_lse=True)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALWAYS)
def test_tensors_that_do_not_fit_are_refused(make_qkv, name):
    q, k, v = make_qkv(4, 4, 4, 3)
    with pytest.raises(InvalidArgumentError, match="4 heads of q"):
        backends.get(name).run(q, k, v)


@pytest.mark.parametrize("name", backends.names())
def test_a_backend_with_lse_can_return_it(name, make_qkv):
    backend = backends.get(name)
    q, k, v = make_qkv(4, 4, dtype=torch.float16)
    spec = AttentionSpec.of(q, k, v, needs_lse=True)
    assert hasattr(backend, "run_with_lse") == ("log-sum-exp" not in (backend.supports(on_cuda(spec)) or ""))


def on_cuda(spec: AttentionSpec) -> AttentionSpec:
    return AttentionSpec(**{**vars(spec), "device": "cuda"})


def test_names_and_their_modules():
    assert backends.names() == ["naive", "tiled", "sdpa", "flash_attn", "xformers"]
    assert [backends.get(name).name for name in backends.names()] == backends.names()


def test_an_unknown_name_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"'flash'.*naive, tiled, sdpa, flash_attn, xformers"):
        backends.get("flash")


def test_availability_names_every_backend_and_gives_reasons():
    found = backends.availability()
    assert list(found) == backends.names()
    assert [found[name] for name in ALWAYS] == [None] * 3
    assert all(reason is None or reason.endswith(".") for reason in found.values())


def test_a_spec_is_read_from_tensors(make_qkv):
    spec = AttentionSpec.of(*make_qkv(5, 7, 9, 3, torch.bfloat16), causal=True)
    assert spec == AttentionSpec(
        batch=2,
        q_len=5,
        kv_len=7,
        q_heads=9,
        kv_heads=3,
        head_dim=16,
        dtype=torch.bfloat16,
        device="cpu",
        causal=True,
        needs_lse=False,
    )
    assert len({spec, AttentionSpec.of(*make_qkv(5, 7, 9, 3, torch.bfloat16), causal=True)}) == 1


def test_the_registry_loads_no_library_it_is_not_asked_for():
    code = (
        "import sys\n"
        "from vllm_teach import backends\n"
        "assert 'torch' not in sys.modules\n"
        "backends.get('flash_attn'), backends.get('xformers')\n"
        "assert not {'flash_attn', 'xformers'} & set(sys.modules)\n"
        "assert 'vllm_teach.backends.sdpa' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
