"""What every backend promises, checked on each one that runs here."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vllm_teach import backends, counters
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.traffic import naive_traffic
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

ALWAYS = ["naive", "tiled", "sdpa"]
SLIDING = ["naive", "sdpa"]
SERVED_BY_ALL = AttentionSpec(2, 4, 4, 2, 2, 64, torch.float16, "cuda", causal=True)


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


@pytest.mark.parametrize("heads", [(2, 2), (9, 3)], ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "window"),
    [(9, 9, 3), (1, 12, 5), (4, 12, 5), (12, 4, 2), (6, 6, 1), (6, 6, 5), (6, 6, 6), (6, 9, 100), (3, 0, 2), (0, 3, 2)],
)
@pytest.mark.parametrize("name", SLIDING)
def test_a_window_hides_all_but_the_last_keys(make_qkv, name, q_len, kv_len, window, heads):
    q, k, v = make_qkv(q_len, kv_len, *heads)
    visible = [[0 <= i + kv_len - q_len - j < window for j in range(kv_len)] for i in range(q_len)]
    mask = torch.tensor(visible, dtype=torch.bool).reshape(q_len, kv_len)
    out = backends.get(name).run(q, k, v, causal=True, scale=0.3, window=window)
    torch.testing.assert_close(out, naive_attention(q, k, v, scale=0.3, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", backends.names())
def test_a_window_is_supported_or_refused_with_a_reason(make_qkv, name):
    backend, spec = backends.get(name), replace(SERVED_BY_ALL, window=3)
    refusal = None if name in SLIDING else f"{name} has no sliding window, and one of 3 keys hides some of 4; "
    reason = backend.supports(spec)
    assert reason is None if refusal is None else reason.startswith(refusal)
    assert backend.supports(replace(spec, window=4)) is None  # hides nothing
    if refusal is not None:  # before the library is looked for
        with pytest.raises(InvalidArgumentError, match=f"^{refusal}.*\\.$"):
            backend.run(*make_qkv(4, 4), causal=True, window=3)


@pytest.mark.parametrize("name", backends.names())
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 0, "causal": True}, "window is 0; give a whole number from 1"),
        ({"window": 2.5, "causal": True}, "window is 2.5; give a whole number from 1"),
        ({"window": 3}, "window is 3 and causal False"),
    ],
)
def test_a_window_that_means_nothing_is_refused(make_qkv, name, arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        backends.get(name).run(*make_qkv(4, 4), **arguments)


def test_a_window_in_the_naive_backend_is_counted():
    q, k, v = (torch.randn(1, 50, 2, 8, dtype=torch.float16) for _ in range(3))
    with counters.count() as tally:
        backends.get("naive").run(q, k, v, causal=True, window=7)
    plain = naive_traffic(batch=1, q_len=50, kv_len=50, q_heads=2, kv_heads=2, head_dim=8, input_bytes=2)
    assert tally.bytes_moved == plain.bytes_moved + 50 * 50  # its mask, a byte an element


@pytest.mark.parametrize("name", ALWAYS)
def test_tensors_that_do_not_fit_are_refused(make_qkv, name):
    q, k, v = make_qkv(4, 4, 4, 3)
    with pytest.raises(InvalidArgumentError, match="4 heads of q"):
        backends.get(name).run(q, k, v)


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


def test_a_spec_is_a_shape_and_refuses_what_a_shape_refuses():
    assert SERVED_BY_ALL.group == 1
    with pytest.raises(InvalidArgumentError, match="q_heads is 3"):
        replace(SERVED_BY_ALL, q_heads=3)


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "x", True, 10**400, [1.0]])
@pytest.mark.parametrize("name", backends.names())
def test_a_scale_that_is_no_finite_number_is_refused_everywhere(make_qkv, name, scale, causal):
    with pytest.raises(InvalidArgumentError, match=r"^scale is"):
        backends.get(name).run(*make_qkv(5, 7), scale=scale, causal=causal)


@pytest.mark.parametrize("name", backends.names())
def test_what_is_no_tensor_is_refused_everywhere(make_qkv, name):
    q, k, _ = make_qkv(5, 7)
    with pytest.raises(InvalidArgumentError, match=r"^v is of type NoneType"):
        backends.get(name).run(q, k, None)


def test_a_masked_nan_in_v_spreads_as_the_docstrings_say(make_qkv):
    q, k, v = make_qkv(300, 300)
    v[:, -1] = float("nan")  # hidden from every query but the last
    rows = {
        name: backends.get(name).run(q, k, v, causal=True).isnan().any(dim=-1).any(dim=-1)[0].sum().item()
        for name in ("naive", "tiled")
    }
    assert rows == {
        "naive": 300,
        "tiled": 300 - 256,
    }  # tiles of 128: the last k tile is visited by the last q tile only
