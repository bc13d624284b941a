"""Tests of this folder run the kernels in Triton's interpreter, in a process that test_triton_interpreted.py starts."""

import os
from collections.abc import Callable

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def make_qkv() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def make(
        q_len: int,
        kv_len: int,
        dtype: torch.dtype = torch.float32,
        batch: int = 2,
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 24,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = ((q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1]))
        q, k, v = (torch.randn(batch, length, count, head_dim).to(dtype) for length, count in sizes)
        return q, k, v

    return make


@pytest.fixture
def options_of() -> Callable[..., object]:
    """The kernels' options for the keyword arguments of `naive_attention`."""
    from vllm_teach.kernels.triton_kernels.problem import Options

    def make(
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        **rest: float,
    ) -> Options:
        left, right = window_size
        return Options(left=left, right=0 if causal else right, slopes=alibi_slopes, **rest)

    return make


@pytest.fixture
def assert_by_the_rule() -> Callable[..., None]:
    """FlashAttention's rule: at most `factor` times the error of the plain formula in the same dtype."""

    def check(
        found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, factor: int = 2, slack: float = 1e-5
    ) -> None:
        assert found.shape == exact.shape
        assert found.dtype == plain.dtype
        assert found.isfinite().all()
        if exact.numel():
            error, allowed = ((x.double() - exact).abs().max().item() for x in (found, plain))
            assert error <= factor * allowed + slack, f"{error:.3g} against {allowed:.3g} of the plain formula"

    return check
