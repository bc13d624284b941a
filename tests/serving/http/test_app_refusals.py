"""Bodies that are refused, each in a sentence that names the field, and odd ones that are taken as they are."""

import json
import re

import pytest
from pydantic import WrapValidator

from vllm_teach.serving.http.openai_requests import ChatMessage, ChatRequest, CompletionRequest

COMPLETION = {"prompt": "Once", "max_tokens": 4}
TURN = {"role": "assistant", "content": "Hi"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

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
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"temperature": 1e39}, "temperature"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop[0]"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
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
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"verbosity": "low"}, "verbosity"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
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


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tools": [{"type": "function"}]}, "tools are not built here"),
        ({"tools": [{}, {}]}, "tools are not built here"),
        ({"tool_choice": "required"}, "tools are not built here"),
        ({"functions": [{}]}, "functions are not built here"),
        ({"function_call": {"name": "f"}}, "functions are not built here"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "formats other than text are not built here"),
        ({"modalities": ["text", "audio"]}, "answers other than text are not built here"),
        ({"audio": {"voice": "alloy"}}, "audio is not built here"),
        ({"verbosity": "low"}, "degrees of verbosity are not built here"),
        ({"moderation": {}}, "moderation is not built here"),
        ({"web_search_options": {}}, "web search is not built here"),
        ({"messages": [{**TURN, "refusal": "No."}]}, "refusals are not built here"),
        ({"messages": [{**TURN, "audio": {"id": "a"}}]}, "audio is not built here"),
        ({"messages": [{**TURN, "function_call": {"name": "f"}}]}, "functions are not built here"),
        ({"messages": [{**TURN, "tool_calls": [{}]}]}, "tools are not built here"),
        ({"messages": [{**TURN, "annotations": [{}]}]}, "annotations are not built here"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_not_built_is_said_to_be_and_how_to_do_without(scripted, fields, complaint):
    ask, _ = scripted()
    error = ask("POST", "/v1/chat/completions", {**CHAT, **fields}).error
    assert error["message"].endswith(f" is not valid: {complaint}, so leave the field out.")
    assert error["message"].startswith(f"{error['param']}=")
    assert error["param"].removeprefix("messages[0].") in {*fields, *fields.get("messages", [{}])[0]}


def test_a_suffix_is_not_built_and_images_are_not_read(scripted):
    ask, _ = scripted()
    suffix = ask("POST", "/v1/completions", {**COMPLETION, "suffix": "end"}).error
    assert suffix["message"] == "suffix='end' is not valid: a text to end on is not built here, so leave the field out."
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    error = ask("POST", "/v1/chat/completions", {"messages": [image]}).error
    assert error["message"].endswith("only text is read here, so send parts of type 'text'.")


def test_every_field_that_takes_only_its_default_says_why():
    """A field that may be left out, and takes only null, an empty list or certain words, is one that is not built."""
    found = set()
    for model in (CompletionRequest, ChatRequest, ChatMessage):
        described = model.model_json_schema()
        for name in described["properties"].keys() - set(described["required"]):
            form = described["properties"][name]
            kinds = [kind for kind in form.get("anyOf", [form]) if kind.get("type") != "null"]
            if all({"const", "enum"} & kind.keys() or kind.get("maxItems") == 0 for kind in kinds):
                assert any(isinstance(each, WrapValidator) for each in model.model_fields[name].metadata), name
                found.add(name)
    assert found >= {"suffix", "tools", "tool_choice", "audio", "verbosity", "annotations"}


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_told_to_be_empty(scripted, prompt):
    ask, engine = scripted()
    error = ask("POST", "/v1/completions", {"prompt": prompt}).error
    assert error["message"] == (
        f"prompt={prompt!r} is not valid: an empty prompt leaves nothing to go on from, so give at least one character "
        "or token."
    )
    assert error["param"] == "prompt"
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
