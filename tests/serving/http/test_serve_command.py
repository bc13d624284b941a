"""The flags of `vllm-teach serve`."""

import inspect

import pytest

from vllm_teach.cli import build_parser, serve
from vllm_teach.cli.serve import engine_arguments
from vllm_teach.engine.llm import LLM
from vllm_teach.serving.async_engine.limits import ServingLimits
from vllm_teach.serving.http.server import ServerSettings, address_of, bind, is_loopback
from vllm_teach.serving.http.settings import AppSettings


def parse(*arguments):
    return build_parser().parse_args(["serve", *arguments])


SHORT_LOG = {"max_events": 10_000}


def test_without_flags_only_the_event_log_is_not_as_the_engine_has_it():
    assert engine_arguments(parse()) == SHORT_LOG


def test_engine_flags_are_arguments_of_llm():
    given = engine_arguments(
        parse("--dtype", "float32", "--max-num-seqs", "4", "--swap-space", "0.5", "--no-enable-prefix-caching")
    )
    asked = {"dtype": "float32", "max_num_seqs": 4, "swap_space": 0.5, "enable_prefix_caching": False}
    assert given == SHORT_LOG | asked
    flags = {name.replace("-", "_") for name in serve._ENGINE_FLAGS}
    assert flags <= inspect.signature(LLM).parameters.keys()


def test_the_defaults_of_flags_are_those_of_the_settings():
    arguments = parse()
    for settings in (ServingLimits(), AppSettings(), ServerSettings()):
        for name, value in vars(settings).items():
            if name not in ("served_model_names", "retry_after"):
                assert getattr(arguments, name) == value, name
    assert (arguments.host, arguments.port, arguments.replicas) == ("127.0.0.1", 8000, 1)


@pytest.mark.parametrize("port", ["65536", "-1", "http", "٣"])
def test_a_port_is_a_number(port, capsys):
    with pytest.raises(SystemExit):
        parse("--port", port)
    assert "is no port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "loopback", "start"), [("127.0.0.1", True, "http://127.0.0.1:"), ("0.0.0.0", False, "http://0.0.0.0:")]
)
def test_a_socket_knows_who_can_reach_it(host, loopback, start):
    with bind(host, 0) as sock:
        assert is_loopback(sock) is loopback
        assert address_of(sock).startswith(start)
