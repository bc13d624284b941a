"""Each limit of a server is checked, and the message names it."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.limits import ServingLimits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue", 0),
        ("max_queue", 1.5),
        ("queue_timeout", 0),
        ("queue_timeout", float("inf")),
        ("request_timeout", -1),
        ("request_timeout", "5"),
        ("step_timeout", 0),
        ("step_timeout", None),
    ],
)
def test_a_bad_limit_is_named(name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}="):
        ServingLimits(**{name: value})


def test_none_means_no_timeout():
    limits = ServingLimits(max_queue=1, queue_timeout=None, request_timeout=None)
    assert (limits.max_queue, limits.queue_timeout, limits.request_timeout, limits.step_timeout) == (
        1,
        None,
        None,
        120.0,
    )
