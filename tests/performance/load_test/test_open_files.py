"""Connections need open files: a process asks for as many as its system allows it."""

import resource
from collections.abc import Iterator

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.open_files import allow_connections


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_limit_is_raised_to_what_is_needed_and_a_high_one_is_left_alone(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    allow_connections(500)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (500 < soft < 1000, hard) == (True, limits[1])
    allow_connections(10)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_what_the_system_does_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: pytest.fail("tried"))
    with pytest.raises(InvalidArgumentError, match=r"600 requests in flight need 664 open files.* allows 512"):
        allow_connections(600)
