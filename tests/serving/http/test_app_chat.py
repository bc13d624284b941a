"""`/v1/chat/completions`: the form of answers and streams, by a scripted engine, and the texts, by the real one."""

import httpx
import pytest

from vllm_teach import SamplingParams

URL = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def test_an_answer_has_openais_form(scripted, says):
    ask, _ = scripted([says("Hel"), says("lo", finish="stop")])
    answer = ask("POST", URL, HI).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("vllm_teach-")
    assert answer == {
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 5,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_messages_go_through_the_chat_template(scripted, says):
    ask, engine = scripted([says("x", finish="stop")])
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": "1", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": ""},
    ]
    assert ask("POST", URL, {"messages": messages, "cache_salt": "s"}).status == 200
    prompt = engine.submitted[0][0]
    assert bytes(prompt["prompt_token_ids"]).decode() == "<system>Be brief.<user>one\ntwo<assistant>1<user>"
    assert prompt["cache_salt"] == "s"


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
)
def test_an_answer_may_fill_the_context_or_as_much_as_is_asked(scripted, says, fields, given):
    ask, engine = scripted([says("x", finish="stop")])
    ask("POST", URL, {**HI, **fields})
    assert engine.submitted[0][1].max_tokens == given


def test_a_stream_is_role_contents_and_an_empty_end(scripted, says):
    ask, _ = scripted([{}, says("Hel"), says("lo", finish="stop")])
    answer = ask("POST", URL, {**HI, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = answer.events()
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]
    assert all("usage" not in event for event in events)


def test_usage_in_a_stream_is_null_until_its_own_event(scripted, says):
    ask, _ = scripted([says("ab", finish="stop")])
    *events, usage, _ = ask("POST", URL, {**HI, "stream": True, "stream_options": {"include_usage": True}}).events()
    assert [event["usage"] for event in events] == [None, None, None]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2


def test_several_answers_interleave_each_with_role_and_end(scripted, says):
    ask, _ = scripted([says("a", 1), says("b", 0, "length"), says("c", 1, "stop")])
    *events, _ = ask("POST", URL, {**HI, "n": 2, "stream": True}).events()
    choices = [event["choices"][0] for event in events]
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "a"}),
        (0, {"content": "b"}),
        (0, {}),
        (1, {"content": "c"}),
        (1, {}),
    ]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length", "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_form_of_chats(scripted, says, ranked, stream):
    about = (ranked(("a", -2.0, 3), ("b", -0.5, 1), ("c", -1.0, 2)),)
    ask, engine = scripted([says("a", finish="stop", logprobs=about)])
    answer = ask("POST", URL, {**HI, "logprobs": True, "top_logprobs": 2, "stream": stream})
    found = answer.events()[1] if stream else answer.json()
    assert found["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -2.0,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.5, "bytes": [98]},
                    {"token": "c", "logprob": -1.0, "bytes": [99]},
                ],
            }
        ],
        "refusal": None,
    }
    assert engine.submitted[0][1].logprobs == 2


def test_a_part_of_a_character_has_no_bytes_and_a_step_without_text_still_has_logprobs(scripted, says):
    from vllm_teach.engine.outputs import Logprob
    from vllm_teach.serving.async_engine.messages import CompletionDelta

    half = CompletionDelta(0, "", (226,), ({226: Logprob(-0.5, 1, "\ufffd")},))
    ask, _ = scripted([{"completions": (half,)}, says("x", finish="stop", logprobs=({120: Logprob(-0.1, 1, "x")},))])
    events = ask("POST", URL, {**HI, "logprobs": True, "stream": True}).events()
    [entry] = events[1]["choices"][0]["logprobs"]["content"]
    assert entry == {"token": "\ufffd", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    assert events[1]["choices"][0]["delta"] == {"content": ""}


def test_token_ids_come_when_asked_for(scripted, says):
    for stream in (False, True):
        ask, _ = scripted([says("ab"), says("c", finish="stop")])
        answer = ask("POST", URL, {**HI, "return_token_ids": True, "stream": stream})
        events = answer.events()[:-1] if stream else [answer.json()]
        assert events[0]["prompt_token_ids"] == list(b"<user>Hi")
        found = [event["choices"][0].get("token_ids") for event in events]
        assert found == ([None, [97, 98], [99], None] if stream else [[97, 98, 99]])


def test_the_server_says_what_the_offline_engine_says(tiny_server, offline):
    messages = [{"role": "system", "content": "You are a sailor."}, {"role": "user", "content": "What did you see?"}]
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=4)
    [expected] = offline.chat(messages, params, use_tqdm=False)
    body = {"messages": messages, "max_completion_tokens": 24, "temperature": 0.9, "seed": 4}
    answer = httpx.post(tiny_server.url + URL, json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == len(expected.outputs[0].token_ids)


def test_a_model_without_a_chat_template_says_so(scripted):
    from vllm_teach.errors import InvalidArgumentError

    def refuse(messages):
        raise InvalidArgumentError("messages were given to a model without a chat template: give it a plain text.")

    ask, engine = scripted()
    engine.tokenizer.apply_chat_template = refuse
    answer = ask("POST", URL, HI)
    assert (answer.status, "chat template" in answer.error["message"]) == (400, True)
