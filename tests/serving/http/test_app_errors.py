"""Each error has its status, OpenAI's object, and headers that make the official client do the right thing."""

import asyncio
import json
import re

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
        assert answer.headers["allow"] in ("POST", "GET")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404(scripted, path):
    ask, _ = scripted()
    bodies = {"/v1/chat/completions": CHAT, "/detokenize": {"tokens": [65]}}
    answer = ask("POST", path, {**bodies.get(path, {"prompt": "Hi"}), "model": "gpt-9"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "'scripted'" in answer.error["message"]


REFUSED = [
    ({"n": 0}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 2.0}, "n"),
    ({"n": True}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": "a"}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"prompts": "Hi"}, "prompts"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 129}, "n"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: json.dumps(value)[:40])
def test_a_wrong_field_of_a_completion_is_400_and_named(scripted, fields, param):
    ask, engine = scripted()
    answer = ask("POST", "/v1/completions", {**COMPLETION, **fields})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert re.fullmatch(r"[^.].{15,240}\.", answer.error["message"], re.DOTALL)
    assert engine.submitted == []


REFUSED_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"audio": {}}, "audio"),
    ({"verbosity": "low"}, "verbosity"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"max_tokens": 64}, None),
    ({"prompt": "Hi"}, "prompt"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHATS, ids=lambda value: json.dumps(value)[:40])
def test_a_wrong_field_of_a_chat_is_400_and_named(scripted, fields, param):
    ask, engine = scripted()
    answer = ask("POST", "/v1/chat/completions", {**CHAT, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert engine.submitted == []


def test_fields_that_change_no_answer_are_ignored(scripted, says):
    ask, engine = scripted([says("yes", finish="stop")])
    ignored = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
        "reasoning_effort": "low", "safety_identifier": "s", "prompt_cache_key": "k", "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"}, "modalities": ["text"], "temperature": None, "stop": None, "n": None,
    }  # fmt: skip
    assert ask("POST", "/v1/chat/completions", {**CHAT, **ignored}).status == 200
    assert len(engine.submitted) == 1


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "empty"),
        (b"{", "no valid JSON"),
        (b'{"prompt": "a"', "no valid JSON"),
        (b"[]", "send a JSON object"),
        (b"null", "send a JSON object"),
        (b'"text"', "send a JSON object"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"prompt": "\xe9"}', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt="),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901, "metadata="),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "cannot be read"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature=nan"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature=inf"),
        (b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}", "temperature="),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": ["fine", "\\udc00 x"]}', "surrogate"),
        (b'{"prompt": "a", "\\ud800": 1}', "not valid"),
        (b'{"prompt": "a", "model": "\\ud800"}', "does not exist"),
    ],
)
def test_a_hostile_body_is_refused_in_words(scripted, body, complaint):
    ask, engine = scripted()
    answer = ask("POST", "/v1/completions", body)
    assert answer.status == (404 if "exist" in complaint else 400)
    assert complaint in answer.error["message"]
    assert len(answer.body) < 1000
    assert engine.submitted == []


def test_control_characters_and_other_odd_text_reach_the_engine_unchanged(scripted, says):
    text = "\x00\x01\x1b[31m\x7f\u2028\u202e\ufeff\U0001f600"
    ask, engine = scripted([says(text, finish="stop")])
    answer = ask("POST", "/v1/completions", {"prompt": text, "stream": True})
    assert bytes(engine.submitted[0][0]["prompt_token_ids"]).decode() == text
    first, done = answer.events()
    assert first["choices"][0]["text"] == text
    assert len(answer.body.decode().splitlines()) == 4, "clients that split at U+2028 find two events, too"
    assert done == "[DONE]"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_does_not_say_it_is_json_is_415(scripted, kind):
    ask, _ = scripted()
    answer = ask("POST", "/generate", {"prompt": "Hi"}, headers={"content-type": kind})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_type")


def test_json_may_be_said_in_several_ways(scripted, says):
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        ask, _ = scripted([says("x", finish="stop")])
        assert ask("POST", "/generate", {"prompt": "Hi"}, headers={"content-type": kind}).status == 200


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
