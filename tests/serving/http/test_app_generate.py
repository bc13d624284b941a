"""`/generate`, the short form: its two names for some fields, its answer, its stream."""

import httpx
import pytest

from vllm_teach import SamplingParams

URL = "/generate"


def test_an_answer_is_the_texts(scripted, says):
    ask, engine = scripted([says("ab", 1, "stop"), says("c", 0, "length")])
    assert ask("POST", URL, {"prompt": "Once", "n": 2}).json() == {"text": ["c", "ab"]}
    assert engine.submitted[0][1] == SamplingParams(n=2, max_tokens=16)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "max_tokens": 7},
        {"temp": 0.5, "max_len": 7},
        {"temp": 0.5, "temperature": 0.5, "max_tokens": 7},
        {"temp": 0.5, "temperature": None, "max_len": 7, "max_tokens": None},
    ],
)
def test_the_articles_names_mean_the_same(scripted, says, fields):
    ask, engine = scripted([says("a", finish="stop")])
    ask("POST", URL, {"prompt": "Once", "top_p": 0.5, **fields})
    assert engine.submitted[0][1] == SamplingParams(temperature=0.5, max_tokens=7, top_p=0.5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temp": 0.5, "temperature": 0.6}, "temp"),
        ({"max_len": 5, "max_tokens": 6}, "max_len"),
        ({"temp": -1}, "temp"),
        ({"max_len": 0}, "max_len"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_wrong_field_is_400_and_named(scripted, fields, param):
    ask, _ = scripted()
    answer = ask("POST", URL, {"prompt": "Once", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_stream_has_what_is_new_at_each_ones_place(scripted, says):
    ask, _ = scripted([{}, says("a", 1), says("b", 0), says("", 1, "stop"), says("c", 0, "stop")])
    events = ask("POST", URL, {"prompt": "Once", "n": 2, "stream": True}).events()
    assert events == [{"text": ["", "a"]}, {"text": ["b", ""]}, {"text": ["c", ""]}, "[DONE]"]


def test_the_server_says_what_the_offline_engine_says(tiny_server, offline):
    params = SamplingParams(max_tokens=15, temperature=0)
    [expected] = offline.generate("The old captain", params, use_tqdm=False)
    body = {"prompt": "The old captain", "temp": 0, "max_len": 15}
    assert httpx.post(tiny_server.url + URL, json=body, timeout=60).json() == {"text": [expected.outputs[0].text]}
