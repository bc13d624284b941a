import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import GlobalTokens
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import measure_backends


def qkv(n: int = 9) -> list[torch.Tensor]:
    return [torch.randn(1, n, 2, 8) for _ in range(3)]


def test_all_that_serve_the_call_are_timed_together() -> None:
    found = measure_backends(*qkv(), rounds=3, causal=True)
    assert {"naive", "tiled", "memory_efficient", "sdpa"} <= set(found)
    assert "flex" not in found
    usable = {name for name, reason in backends.availability().items() if reason is None}
    assert set(found) <= usable
    assert {len(timing.samples) for timing in found.values()} == {3}
    assert all(timing.low > 0 for timing in found.values())


def test_what_refuses_the_call_is_left_out() -> None:
    assert "sdpa" not in measure_backends(*qkv(), rounds=1, softcap=2.0)
    found = measure_backends(*qkv(), names=("naive", "sdpa"), rounds=1, pattern=GlobalTokens(2), softcap=2.0)
    assert list(found) == ["naive"]


def test_nobody_left_and_unknown_names_are_errors() -> None:
    with pytest.raises(InvalidArgumentError, match="none of them can serve"):
        measure_backends(*qkv(), names=("flash_attn",), rounds=1)
    with pytest.raises(InvalidArgumentError, match="no attention backend 'fast'"):
        measure_backends(*qkv(), names=("fast",))
    with pytest.raises(InvalidArgumentError, match="rounds"):
        measure_backends(*qkv(), names=("naive",), rounds=0)
