from collections.abc import Callable

import pytest
import torch


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
