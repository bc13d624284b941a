"""`vllm-teach serve` as a process of its own: it starts, says where it is, and ends in good order."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from vllm_teach import cli

COMMAND = [sys.executable, "-m", "vllm_teach.cli", "serve", "--model", "tiny", "--port", "0", "--dtype", "float32"]


class Served:
    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[-1] if self.line else ""

    def end(self, number: int, *, within: float = 60) -> tuple[int, str]:
        """Send a signal; return the exit status and what was printed as errors."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=within)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[object]:
    started: list[Served] = []

    def make(*arguments: str) -> Served:
        started.append(Served(*arguments))
        return started[-1]

    yield make
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


LONG = {"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize(("engine", "number"), [("process", signal.SIGTERM), ("thread", signal.SIGINT)])
def test_a_signal_under_load_lets_all_in_flight_finish_and_the_exit_status_is_0(start, engine, number):
    served = start("--engine", engine)
    assert served.line == f"tiny is served on {served.url}\n"
    whole = httpx.post(served.url + "/generate", json=LONG, timeout=60).json()["text"]
    answers: list[object] = []
    begun = threading.Barrier(9)

    def stream() -> None:
        with httpx.stream("POST", served.url + "/generate", json={**LONG, "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            parts = [next(lines)]
            begun.wait(60)
            parts += lines
        events = [line[6:] for line in parts if line]
        answers.append(["".join(json.loads(event)["text"][0] for event in events[:-1])])
        assert events[-1] == "[DONE]"

    threads = [threading.Thread(target=stream) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait(60)  # all are in the midst of their answers
    status, errors = served.end(number)
    for thread in threads:
        thread.join(60)
    assert status == 0
    assert re.fullmatch(r"vllm-teach: finishing [1-8] requests? \(at most 30 s\); .*\n", errors)
    assert answers == [whole] * 8
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url + "/health")


def test_what_does_not_finish_in_time_ends_in_an_error_that_says_so(start):
    served = start("--drain-timeout", "0")
    with httpx.stream(
        "POST",
        served.url + "/generate",
        json={**LONG, "n": 16, "seed": 1, "temperature": 1, "stream": True},
        timeout=60,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        status, errors = served.end(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert json.loads(last[6:])["error"]["code"] == "engine_dead"
    assert (status, errors) == (0, "vllm-teach: stopping without finishing 1 request.\n")


def test_a_second_signal_ends_all_at_once(start):
    served = start("--engine", "thread", "--drain-timeout", "600")
    body = {**LONG, "n": 64, "seed": 1, "temperature": 1, "stream": True}
    with httpx.stream("POST", served.url + "/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(0.5)
        status, errors = served.end(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert status == 0
    assert [line.split(" ", 2)[1] for line in errors.splitlines()] == ["finishing", "stopping"]


def test_a_port_in_use_is_one_line_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"vllm-teach: port={port} of host='127.0.0.1' cannot be served on (Address already in use)")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--model", "no/such/folder", "--engine", "process"], "no/such/folder"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--host", "not.a.name.invalid"], "not.a.name.invalid"),
        (["--api-key", "two words"], "api_key"),
        (["--queue-timeout", "-1"], "queue_timeout"),
        (["--drain-timeout", "-1"], "drain_timeout"),
        (["--header-timeout", "0"], "header_timeout"),
        (["--send-timeout", "0"], "send_timeout"),
        (["--body-timeout", "nan"], "body_timeout"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_1(arguments, complaint, capsys):
    assert cli.main(["serve", "--model", "tiny", "--port", "0", "--engine", "thread", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("vllm-teach: ")
    assert complaint in line


def test_the_key_comes_from_the_environment_and_other_flags_arrive(start, monkeypatch):
    monkeypatch.setenv("VLLM_TEACH_API_KEY", "secret")
    served = start(
        "--served-model-name", "mine", "yours", "--max-model-len", "100", "--max-choices", "2", "--access-log"
    )
    assert httpx.get(served.url + "/v1/models").status_code == 401
    headers = {"authorization": "Bearer secret"}
    models = httpx.get(served.url + "/v1/models", headers=headers).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("mine", 100), ("yours", 100)]
    assert httpx.post(served.url + "/generate", json={"prompt": "A", "n": 3}, headers=headers).status_code == 400
    assert 'model_name="mine"' in httpx.get(served.url + "/metrics").text
    status, errors = served.end(signal.SIGTERM)
    assert status == 0
    assert "secret" not in errors


def test_killed_it_leaves_no_engine_behind(start):
    served = start()
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children
    served.process.kill()
    served.process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_a_killed_engine_is_503_and_the_server_still_ends_in_good_order(start):
    served = start()
    for child in psutil.Process(served.process.pid).children():
        if "resource_tracker" not in " ".join(child.cmdline()):
            child.kill()
            child.wait(30)
    for _ in range(3000):
        if httpx.get(served.url + "/health", timeout=30).status_code == 503:
            break
    answer = httpx.post(served.url + "/generate", json={"prompt": "A"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    status, _ = served.end(signal.SIGTERM)
    assert status == 0
