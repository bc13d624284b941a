"""Settings are checked when they are made."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.http.server import ServerSettings
from vllm_teach.serving.http.settings import AppSettings


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (AppSettings, "served_model_names", "tiny"),
        (AppSettings, "served_model_names", ("",)),
        (AppSettings, "max_body_bytes", 0),
        (AppSettings, "body_timeout", 0),
        (AppSettings, "body_timeout", float("inf")),
        (AppSettings, "max_choices", 0),
        (AppSettings, "max_output_tokens", 0),
        (AppSettings, "max_logprobs", -1),
        (AppSettings, "retry_after", 0),
        (ServerSettings, "drain_timeout", -1),
        (ServerSettings, "header_timeout", 0),
        (ServerSettings, "send_timeout", 0),
        (ServerSettings, "access_log", "yes"),
    ],
)
def test_a_wrong_setting_is_named(kind, name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        kind(**{name: value})


def test_names_may_be_a_list():
    assert AppSettings(served_model_names=["a", "b"]).served_model_names == ("a", "b")
