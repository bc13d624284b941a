"""Fixtures that several rooms share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from vllm_teach.errors import ModelNotFoundError
from vllm_teach.models import resolve_model

# The same examples in every run, so that a red run is red for whoever repeats it. HYPOTHESIS_PROFILE=explore draws new
# ones: for a look around after a change.
settings.register_profile("repeat", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Ctrl-C means KeyboardInterrupt, here and in child processes: a shell's background job starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The fetched SmolLM2 directory. Fails where it is absent: a skip would hide most of what the suite proves."""
    try:
        return resolve_model("smollm2")
    except ModelNotFoundError as error:
        pytest.fail(f"this test runs the real model, and {error}", pytrace=False)
