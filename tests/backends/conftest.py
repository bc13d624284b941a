from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_qkv() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def make(
        q_len: int, kv_len: int, q_heads: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = [(q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads)]
        q, k, v = (torch.randn(2, length, heads, 16, generator=generator).to(dtype) for length, heads in sizes)
        return q, k, v

    return make


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the flex backend run FlexAttention's unfused version: the same answers, without a compiler's seconds."""
    from torch.nn.attention import flex_attention

    from vllm_teach.backends import flex

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex, "unavailable", lambda: None)
