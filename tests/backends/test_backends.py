"""What every backend promises beside the right numbers: its name, its reasons, its errors."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vllm_teach import backends, counters
from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.traffic import naive_traffic
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

SPEC = AttentionSpec(2, 4, 4, 2, 2, 64, torch.float16, "cuda", Causal())


def test_names_and_their_modules() -> None:
    assert backends.names()[0] == "naive"
    assert backends.names()[-1] == "xformers"
    assert [backends.get(name).name for name in backends.names()] == backends.names()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'flash'.*naive, tiled, .*sdpa.*, flash_attn, xformers\.$"):
        backends.get("flash")


def test_availability_names_every_backend_and_gives_reasons() -> None:
    found = backends.availability()
    assert list(found) == backends.names()
    assert [found[name] for name in ("naive", "tiled", "memory_efficient", "sdpa")] == [None] * 4
    assert all(reason is None or reason.endswith(".") for reason in found.values())


def test_a_spec_is_a_shape_and_refuses_what_a_shape_refuses() -> None:
    assert SPEC.group == 1
    with pytest.raises(InvalidArgumentError, match="q_heads is 3"):
        replace(SPEC, q_heads=3)


def test_a_spec_says_what_the_call_asks_for(make_qkv) -> None:
    q, k, v = make_qkv(5, 7, 4, 2, torch.float32)
    slopes = torch.rand(4)
    spec = AttentionSpec.of(q, k, v, window_size=(2, 0), softcap=3.0, alibi_slopes=slopes, dropout_p=0.1)
    assert spec == AttentionSpec(
        2, 5, 7, 4, 2, 16, torch.float32, "cpu", LocalWindow(2, 0), softcap=3.0, alibi=True, dropout=True
    )
    assert not AttentionSpec.of(q, k, v).requires_grad
    with torch.no_grad():
        assert not AttentionSpec.of(q.requires_grad_(), k, v).requires_grad
    assert AttentionSpec.of(q, k, v).requires_grad


def test_a_pattern_in_the_naive_backend_is_not_counted_as_a_mask() -> None:
    q, k, v = (torch.randn(1, 50, 2, 8, dtype=torch.float16) for _ in range(3))
    with counters.count() as tally:
        backends.get("naive").run(q, k, v, causal=True, window_size=(6, 0))
    plain = naive_traffic(batch=1, q_len=50, kv_len=50, q_heads=2, kv_heads=2, head_dim=8, input_bytes=2)
    assert tally.bytes_moved == plain.bytes_moved


def test_the_registry_loads_no_library_it_is_not_asked_for() -> None:
    code = (
        "import sys\n"
        "from vllm_teach import backends\n"
        "assert 'torch' not in sys.modules\n"
        "for name in backends.names(): backends.get(name)\n"
        "assert not {'flash_attn', 'xformers', 'triton'} & set(sys.modules)\n"
        "assert 'torch._inductor' not in sys.modules\n"
        "assert 'torch.nn.attention.flex_attention' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_masked_nan_in_v_spreads_as_the_docstrings_say(make_qkv) -> None:
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
