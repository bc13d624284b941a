"""The official client, unchanged: what it asks is understood, what it gets it can read."""

import openai
import pytest

from vllm_teach.errors import EngineDeadError, QueueFullError, RequestTimeoutError

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def client(tiny_server):
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].object == "model"
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_with_usage_and_stop(client):
    answer = client.completions.create(model="tiny", prompt="The sea", max_tokens=20, temperature=0)
    [choice] = answer.choices
    assert answer.object == "text_completion"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    stop = choice.text[8:11]
    cut = client.completions.create(model="tiny", prompt="The sea", max_tokens=20, temperature=0, stop=[stop, "#"])
    assert cut.choices[0].text == choice.text[: choice.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop


def test_a_seed_repeats_and_n_differs(client):
    def ask():
        answer = client.completions.create(model="tiny", prompt="The sea", max_tokens=12, n=2, seed=7, temperature=1.3)
        return [choice.text for choice in answer.choices], answer.system_fingerprint

    first, second = ask(), ask()
    assert first == second
    assert first[0][0] != first[0][1]


def test_completion_stream(client):
    whole = client.completions.create(model="tiny", prompt="The sea", max_tokens=9, temperature=0).choices[0].text
    events = list(
        client.completions.create(
            model="tiny",
            prompt="The sea",
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(event.choices[0].text for event in events if event.choices) == whole
    assert events[-1].usage.completion_tokens == 9
    assert events[-2].choices[0].finish_reason == "length"


def test_completion_logprobs_and_echo(client):
    answer = client.completions.create(
        model="tiny", prompt="The sea", max_tokens=3, logprobs=2, echo=True, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    for token, own, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[1:]:
        assert 2 <= len(top) <= 3
        assert top[token] == own
    starts = logprobs.text_offset
    assert all(answer.choices[0].text[at:].startswith(token) for at, token in zip(starts, logprobs.tokens, strict=True))


def test_chat_and_its_stream(client):
    settings = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 11, "temperature": 0}
    answer = client.chat.completions.create(**settings)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == 11
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert chunks[-1].choices[0].delta.content is None


def test_an_answer_can_be_sent_back_as_it_is(client):
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
    messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And then?"}]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=3).usage.prompt_tokens > 0


def test_the_clients_own_stream_helper(client):
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, "stop": ["e", "a", "o"], "n": 2, "seed": 1}
    with client.chat.completions.stream(**settings) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert len(final.choices) == 2
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob, "the greedy token is the likeliest"
        assert bytes(entry.bytes).decode() == entry.token


def test_fields_of_vllm_go_by_extra_body(client):
    answer = client.completions.create(
        model="tiny",
        prompt=[[5, 6, 7]],
        max_tokens=6,
        logit_bias={"0": 100},
        extra_body={
            "ignore_eos": True,
            "min_tokens": 2,
            "top_k": 5,
            "repetition_penalty": 1.1,
            "return_token_ids": True,
        },
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].prompt_token_ids == [5, 6, 7]
    assert len(answer.choices[0].token_ids) == 6


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"extra_body": {"made_up": 1}}, openai.BadRequestError, "made_up"),
    ],
)
def test_errors_have_their_classes(client, fields, kind, param):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert caught.value.request_id
    assert str(caught.value.body["message"]).endswith(".")


def test_authentication(make_server):
    server = make_server(api_key="right")
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=server.url + "/v1", api_key="right") as client:
        assert client.models.list().data[0].id == "tiny"


@pytest.fixture
def client_of():
    """A maker of clients of servers, by how often they try again."""
    clients = []

    def make(server, max_retries=0):
        url = server.url + "/v1"
        clients.append(openai.OpenAI(base_url=url, api_key="none", max_retries=max_retries, timeout=60))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


FULL = QueueFullError("256 requests wait already: send this one later.")
LATE = RequestTimeoutError("the request waited too long: send it later.")
DEAD = EngineDeadError("the engine is dead: restart the server.")


def test_a_full_queue_is_a_rate_limit_and_the_client_comes_back_by_itself(serve_scripted, client_of, says):
    server = serve_scripted([FULL, FULL, FULL, [says("yes", finish="stop")]], retry_after=0.02)
    with pytest.raises(openai.RateLimitError) as caught:
        client_of(server).completions.create(model="scripted", prompt="A")
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "1"
    answer = client_of(server, max_retries=2).completions.create(model="scripted", prompt="A")
    assert answer.choices[0].text == "yes"


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_is_not_retried(serve_scripted, client_of, says, stream):
    server = serve_scripted([[LATE], [says("yes", finish="stop")]])
    with pytest.raises(openai.APIStatusError) as caught:
        client_of(server, max_retries=3).completions.create(model="scripted", prompt="A", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (408, "request_timeout")
    assert len(server.engine.submitted) == 1


def test_a_dead_engine_is_an_internal_server_error(serve_scripted, client_of):
    server = serve_scripted([DEAD])
    with pytest.raises(openai.InternalServerError) as caught:
        client_of(server).completions.create(model="scripted", prompt="A")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")


def test_an_error_in_a_stream_is_an_api_error(serve_scripted, client_of, says):
    server = serve_scripted([[says("a"), DEAD]])
    stream = client_of(server, max_retries=3).completions.create(model="scripted", prompt="A", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="the engine is dead") as caught:
        next(stream)
    assert caught.value.code == "engine_dead"
    assert len(server.engine.submitted) == 1
