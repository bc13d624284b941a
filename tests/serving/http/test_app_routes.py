"""What is neither a completion nor a chat: tokens, models, health, version, metrics, names of requests."""

import socket

import httpx
import pytest

from vllm_teach.errors import EngineDeadError
from vllm_teach.serving.metrics.scrape import scrape, scrape_until
from vllm_teach.serving.metrics.server_metrics import ServerMetrics
from vllm_teach.version import __version__


def test_tokenize_and_detokenize_are_inverse(scripted):
    ask, _ = scripted()
    answer = ask("POST", "/tokenize", {"prompt": "Añ", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [65, 195, 177],
        "token_strs": ["A", "\ufffd", "\ufffd"],
    }
    assert ask("POST", "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Añ"}


def test_tokenize_takes_a_conversation_an_empty_text_and_a_long_one(scripted):
    ask, _ = scripted()
    chat = ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "A"}]}).json()
    assert bytes(chat["tokens"]) == b"<user>A"
    assert ask("POST", "/tokenize", {"prompt": ""}).json()["tokens"] == []
    long = ask("POST", "/tokenize", {"prompt": "ab" * 10_000, "return_token_strs": True}).json()
    assert (long["count"], len(long["token_strs"])) == (20_000, 20_000)
    assert ask("POST", "/detokenize", {"tokens": long["tokens"]}).json() == {"prompt": "ab" * 10_000}


@pytest.mark.parametrize(
    ("fields", "first"), [({}, 1), ({"add_special_tokens": True}, 1), ({"add_special_tokens": False}, 65)]
)
def test_special_tokens_around_a_prompt_are_added_unless_they_are_not_wanted(scripted, fields, first):
    ask, engine = scripted()
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, add_special_tokens=True: [1] * add_special_tokens + encode(text)
    assert ask("POST", "/tokenize", {"prompt": "A", **fields}).json()["tokens"][0] == first
    assert ask("POST", "/tokenize", {"prompt": "", **fields}).json()["count"] == (first == 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "A"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "A"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_a_wrong_body_is_400(scripted, path, body, param):
    ask, _ = scripted()
    answer = ask("POST", path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_model_has_each_of_its_names(scripted, says):
    ask, _ = scripted([says("x", finish="stop")], served_model_names=("mine", "org/other"))
    models = ask("GET", "/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["mine", "org/other"]
    one = ask("GET", "/v1/models/org/other").json()
    assert one == models["data"][1]
    assert (one["object"], one["root"], one["max_model_len"]) == ("model", "scripted", 64)
    assert ask("POST", "/v1/completions", {"model": "org/other", "prompt": "A"}).json()["model"] == "mine"


def test_health_follows_the_engine(scripted):
    ask, engine = scripted()
    assert (ask("GET", "/health").status, ask("GET", "/health").json()) == (200, {"status": "ok"})
    engine.dead = "the engine's process has ended: restart the server."
    answer = ask("GET", "/health")
    assert (answer.status, answer.error["code"], answer.error["message"]) == (503, "engine_dead", engine.dead)


def test_asking_after_a_dead_engine_counts_as_no_failed_request(scripted):
    metrics = ServerMetrics("tiny")
    dead = EngineDeadError("the engine's process has ended: restart the server.")
    ask, engine = scripted(dead, metrics=metrics)
    engine.dead = str(dead)
    errors = 'vllm_teach:request_errors_total{engine="0",kind="engine_dead",model_name="tiny"}'
    ask("GET", "/health")
    assert f"{errors} 0.0" in metrics.render()[0].decode()
    assert ask("POST", "/v1/completions", {"prompt": "A"}).status == 503
    assert f"{errors} 1.0" in metrics.render()[0].decode()


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/models/scripted", "/openapi.json"])
def test_what_takes_get_takes_head_as_balancers_send_it(scripted, path):
    ask, _ = scripted()
    head, get = ask("HEAD", path), ask("GET", path)
    assert (head.status, get.status) == (200, 200)
    assert head.headers["content-length"] == str(len(get.body))
    assert set(ask("DELETE", path).headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert ask("HEAD", "/generate").headers["allow"] == "POST"


def test_a_head_says_that_the_engine_is_dead_and_is_counted_by_its_path(scripted):
    metrics = ServerMetrics("tiny")
    ask, engine = scripted(metrics=metrics)
    engine.dead = "the engine's process has ended: restart the server."
    assert ask("HEAD", "/health").status == 503
    assert ask("HEAD", "/metrics").status == 200
    counted = metrics.render()[0].decode()
    for path, status in (("/health", 503), ("/metrics", 200)):
        labels = f'engine="0",handler="{path}",method="HEAD",model_name="tiny",status="{status}"'
        assert f"http_requests_total{{{labels}}} 1.0" in counted


def test_a_head_has_no_body_on_the_wire(serve_scripted):
    running = serve_scripted([])
    with socket.create_connection(running.address, timeout=30) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n")


def test_version(scripted):
    ask, _ = scripted()
    assert ask("GET", "/version").json() == {"version": __version__}


def test_a_request_keeps_its_name_or_gets_one(scripted):
    ask, _ = scripted()
    assert ask("GET", "/health", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    first, second = (ask("GET", "/nothing").headers["x-request-id"] for _ in range(2))
    assert first != second
    for odd in ("a\tb", "ü", "x" * 129, ""):
        assert ask("GET", "/health", headers={"x-request-id": odd}).headers["x-request-id"] != odd


def test_metrics_are_what_the_engine_did(tiny_server):
    before = scrape(tiny_server.url)
    body = {"prompt": "The sea", "max_len": 3, "ignore_eos": True}
    assert httpx.post(tiny_server.url + "/generate", json=body, timeout=60).is_success
    made = before.value("vllm:generation_tokens_total") + 3
    after = scrape_until(tiny_server.url, lambda page: page.value("vllm:generation_tokens_total") == made)
    assert after.value("http_requests_total", handler="/generate", method="POST", status="200") == 1
    assert after.value("vllm:time_to_first_token_seconds_count") == 1
    assert httpx.get(tiny_server.url + "/metrics").headers["content-type"].startswith("text/plain")


def test_the_openapi_document_describes_every_route(scripted):
    ask, _ = scripted()
    document = ask("GET", "/openapi.json").json()
    assert document["paths"].keys() == {
        "/v1/completions",
        "/v1/chat/completions",
        "/generate",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/version",
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"], "FastAPI's own errors are not sent"
            assert {"4XX", "5XX"} <= operation["responses"].keys()
