import time
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Times of tiny tensors on several threads measure the threads' meeting points, and other tests may run as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Clock:
    """A clock that stands still but for a tick at each look at it, so that what is timed can be tested exactly."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces `time.perf_counter`: two looks in succession lie one second apart."""
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter", fake.perf_counter)
    return fake
