import math
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
        batch: int = 2,
        q_len: int = 7,
        kv_len: int = 7,
        q_heads: int = 2,
        kv_heads: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def draw(length: int, heads: int) -> torch.Tensor:
            return torch.randn(batch, length, heads, head_dim, dtype=torch.float64, generator=generator).to(dtype)

        return draw(q_len, q_heads), draw(kv_len, kv_heads), draw(kv_len, kv_heads)

    return make


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """The most bytes that PyTorch's CPU allocator had handed out at once during a call, beyond those before it.

    Read from the profiler's record of every single allocation and release, so neither the C library nor the operating
    system blurs it.
    """

    def measure(function: Callable[[], object]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = function()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        del result
        return peak

    return measure


@pytest.fixture
def loglog_slope() -> Callable[[list[int], list[int]], float]:
    """The least-squares slope of log(y) over log(x): 1 for y ~ x, 2 for y ~ x²."""

    def slope(xs: list[int], ys: list[int]) -> float:
        log_x, log_y = [math.log(x) for x in xs], [math.log(y) for y in ys]
        mean_x, mean_y = sum(log_x) / len(xs), sum(log_y) / len(ys)
        covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True))
        return covariance / sum((x - mean_x) ** 2 for x in log_x)

    return slope
