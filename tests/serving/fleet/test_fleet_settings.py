"""The arguments of `serve run`: texts that become settings, or errors that name them."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.async_engine.limits import ServingLimits
from vllm_teach.serving.fleet.fleet_settings import ScalingSettings, read_fleet_settings
from vllm_teach.serving.http.settings import AppSettings


def test_texts_become_what_they_say():
    texts = {
        "model": "123", "min_replicas": "2", "max_replicas": "6", "num_gpus": "0.5", "max_queue": "7",
        "queue_timeout": "null", "api_key": "1234", "served_model_names": "one, two", "max_num_seqs": "8",
        "enable_prefix_caching": "false", "dtype": "float32", "device": "cuda:1", "swap_file": "/tmp/a b",
    }  # fmt: skip
    settings = read_fleet_settings(texts)
    assert settings.model == "123"
    assert settings.scaling == ScalingSettings(2, 6, num_gpus=0.5)
    assert settings.limits == ServingLimits(max_queue=7)
    assert settings.app == AppSettings(("one", "two"), "1234")
    assert settings.engine_args == {
        "max_num_seqs": 8, "enable_prefix_caching": False, "dtype": "float32", "device": "cuda:1",
        "swap_file": "/tmp/a b", "max_events": 10_000,
    }  # fmt: skip


def test_values_of_a_configuration_file_are_taken_as_they_are():
    settings = read_fleet_settings(
        {"model": "tiny", "max_replicas": 3, "served_model_names": ["a"], "max_events": None}
    )
    assert settings.scaling.max_replicas == 3
    assert settings.app.served_model_names == ("a",)
    assert settings.engine_args == {"max_events": None}


def test_requests_in_flight_follow_the_engine():
    settings = read_fleet_settings({"model": "tiny"})
    assert settings.target_ongoing_requests == 32  # half of LLM's 64
    assert settings.max_ongoing_requests > 64 + 256, "the engine's queue is full before, and answers 429"
    settings = read_fleet_settings({"model": "tiny", "max_num_seqs": "4", "max_queue": "2"})
    assert settings.target_ongoing_requests == 2
    assert settings.max_ongoing_requests > 4 + 2
    assert read_fleet_settings({"model": "tiny", "target_ongoing_requests": "5"}).target_ongoing_requests == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model=None is not valid"),
        ({"model": ""}, "model='' is not valid"),
        ({"model": "tiny", "replicas": "2"}, "'replicas' is unknown.*min_replicas.*max_queue.*api_key"),
        ({"model": "tiny", "min_replicas": "0"}, "min_replicas=0"),
        ({"model": "tiny", "min_replicas": "3", "max_replicas": "2"}, "max_replicas=2.*min_replicas=3"),
        ({"model": "tiny", "max_replicas": "many"}, "max_replicas='many'"),
        ({"model": "tiny", "max_replicas": "["}, "max_replicas='\\['"),
        ({"model": "tiny", "target_ongoing_requests": "0"}, "target_ongoing_requests=0"),
        ({"model": "tiny", "num_gpus": "-1"}, "num_gpus=-1"),
        ({"model": "tiny", "health_check_period": "0"}, "health_check_period=0"),
        ({"model": "tiny", "max_num_seqs": "0"}, "max_num_seqs=0"),
        ({"model": "tiny", "served_model_names": "a,"}, "served_model_names"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        read_fleet_settings(arguments)
