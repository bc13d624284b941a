"""Each error has its status, OpenAI's object, and headers that make the official client do the right thing."""

import asyncio
import json

import pytest

from vllm_teach.errors import (
    EngineDeadError,
    EngineError,
    InvalidArgumentError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
)
from vllm_teach.serving.http.http_errors import ApiError, describe_error

COMPLETION = {"prompt": "Once", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

FROM_ENGINE = [
    (InvalidArgumentError("n=3 is not valid: use 1."), 400, "invalid_request_error", None, "n"),
    (PromptTooLongError("the prompt is long: cut it."), 400, "invalid_request_error", "context_length_exceeded", None),
    (QueueFullError("256 wait already: come later."), 429, "rate_limit_error", "queue_full", None),
    (RequestTimeoutError("it waited too long: come later."), 408, "timeout_error", "request_timeout", None),
    (EngineError("the forward pass failed: send it again."), 500, "server_error", "engine_error", None),
    (EngineDeadError("the engine is dead: restart it."), 503, "server_error", "engine_dead", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("submitted", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), FROM_ENGINE)
def test_an_engine_error_before_the_first_token_has_a_status(
    scripted, stream, submitted, path, body, error, status, kind, code, param
):
    ask, _ = scripted([error] if submitted else error)
    answer = ask("POST", path, {**body, "stream": stream})
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.error == {"message": str(error), "type": kind, "param": param, "code": code}


def test_a_full_queue_says_when_to_come_back_and_not_to_all_the_same(scripted):
    waits = set()
    for _ in range(20):
        ask, _ = scripted(QueueFullError("256 wait already: come later."), retry_after=1.5)
        answer = ask("POST", "/generate", COMPLETION)
        assert answer.headers["retry-after"] == "2"
        waits.add(int(answer.headers["retry-after-ms"]))
        assert "x-should-retry" not in answer.headers
    assert all(750 <= wait <= 2250 for wait in waits)
    assert len(waits) > 5


def test_a_timeout_asks_the_client_not_to_retry(scripted):
    ask, _ = scripted([RequestTimeoutError("it waited too long: come later.")])
    assert ask("POST", "/generate", COMPLETION).headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_error_in_a_stream_is_its_last_event_and_done_does_not_follow(scripted, says, path):
    ask, engine = scripted([{}, says("ab"), EngineError("the forward pass failed: send it again.")])
    answer = ask("POST", path, {**COMPLETION, "stream": True})
    assert answer.status == 200
    *_, last = answer.events()
    assert last["error"]["code"] == "engine_error"
    assert engine.streams[0].closed.is_set()


def test_an_unforeseen_error_tells_nothing_of_itself_but_to_the_log(scripted, caplog):
    ask, engine = scripted([RuntimeError("secret")])
    answer = ask("POST", "/generate", COMPLETION, headers={"x-request-id": "mine"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.body.decode()
    assert "mine" in caplog.text
    assert "RuntimeError: secret" in caplog.text
    assert engine.streams[0].closed.is_set()


def test_an_unforeseen_error_in_a_route_is_counted(scripted, caplog):
    recorder = Recorder()
    ask, engine = scripted(metrics=recorder)
    engine.tokenizer = None
    assert ask("POST", "/detokenize", {"tokens": [5]}).status == 500
    assert recorder.errors == ["internal_error"]
    assert recorder.responses == [("POST", "/detokenize", 500)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_error_behind_the_engine_is_counted(scripted, stream):
    recorder = Recorder()
    ask, _ = scripted([{}, RuntimeError("by chance")], metrics=recorder)
    ask("POST", "/generate", {**COMPLETION, "stream": stream})
    assert recorder.errors == ["internal_error"]


def test_an_unforeseen_error_in_a_stream_tells_nothing_of_itself(scripted, says):
    ask, _ = scripted([says("ab"), RuntimeError("secret")])
    answer = ask("POST", "/generate", {**COMPLETION, "stream": True})
    assert answer.events()[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/nothing", 404, "not_found"),
        ("GET", "/metrics/", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),  # this app was made without metrics
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_a_wrong_path_or_method_has_openais_error_object(scripted, method, path, status, code):
    ask, _ = scripted()
    answer = ask(method, path)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.error["message"].endswith(".")
    if status == 405:
        assert answer.headers["allow"] in ("POST", "GET, HEAD")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404(scripted, path):
    ask, _ = scripted()
    bodies = {"/v1/chat/completions": CHAT, "/detokenize": {"tokens": [65]}}
    answer = ask("POST", path, {**bodies.get(path, {"prompt": "Hi"}), "model": "gpt-9"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "'scripted'" in answer.error["message"]


class Recorder:
    def __init__(self) -> None:
        self.errors, self.responses = [], []

    def on_error(self, error) -> None:
        self.errors.append(error)

    def on_response(self, *what) -> None:
        self.responses.append(what)


def test_what_never_came_to_the_engine_is_counted_and_what_did_is_left_to_it(scripted, says):
    full = QueueFullError("256 wait already: come later.")
    recorder = Recorder()
    ask, _ = scripted(full, [EngineError("it failed: again.")], [says("a", finish="stop")], metrics=recorder)
    for _ in range(3):
        ask("POST", "/generate", COMPLETION)
    ask("POST", "/generate", {})
    ask("GET", "/nothing/at/all")
    ask("GET", "/v1/models/who")
    assert recorder.errors == [full, "invalid_request", "not_found", "model_not_found"]
    assert recorder.responses == [
        ("POST", "/generate", 429),
        ("POST", "/generate", 500),
        ("POST", "/generate", 200),
        ("POST", "/generate", 400),
        ("GET", "unknown", 404),
        ("GET", "/v1/models/{model:path}", 404),
    ]


def test_an_error_message_is_always_utf8():
    body = describe_error(ApiError("half \ud800 a pair.", param="\udfff")).body()
    assert json.loads(body)["error"]["message"] == "half \\ud800 a pair."


def test_before_the_engine_is_started_all_is_503(ask):
    from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
    from vllm_teach.serving.http.app import create_app

    app = create_app(AsyncLLMEngine.spawn("tiny"))
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("POST", "/generate", COMPLETION),
    ):
        answer = asyncio.run(ask(app, method, path, body))
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
