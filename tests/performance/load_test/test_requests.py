"""The bodies that are sent: what is good is what OpenAI's interface says, what is malformed is malformed."""

import json

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.requests import MALFORMED, RequestForm


def test_a_completion_and_a_chat() -> None:
    assert json.loads(RequestForm("m").body([1, 2], 9)) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat = RequestForm("m", chat=True, stream=False, ignore_eos=False, extra={"temperature": 1, "top_p": 0.5})
    assert (RequestForm("m").path, chat.path) == ("/v1/completions", "/v1/chat/completions")
    assert json.loads(chat.body("Hi", 9)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "temperature": 1,
        "top_p": 0.5,
    }
    with pytest.raises(InvalidArgumentError, match="no chat takes"):
        chat.body([1], 9)


def test_the_kinds_of_malformed_requests_are_all_reached_and_all_differ_from_the_good_one() -> None:
    form = RequestForm("m")
    good = form.body([1, 2], 9)
    bodies = [form.malformed_body([1, 2], 9, (number + 0.5) / len(MALFORMED)) for number in range(len(MALFORMED))]
    assert len({good, *bodies}) == len(MALFORMED) + 1
    assert form.malformed_body([1, 2], 9, 1.0) in bodies


@pytest.mark.parametrize("chat", [False, True])
def test_each_kind_is_as_wrong_as_its_name_says(chat: bool) -> None:
    form = RequestForm("m", chat=chat)
    good = form.fields("Hi", 9)
    made = {name: make(good) for name, make in MALFORMED.items()}
    for name in ("JSON that is cut", "bytes that are no UTF-8", "an empty body"):
        with pytest.raises(ValueError):  # noqa: PT011 - JSON's and UTF-8's errors
            json.loads(made.pop(name))
    assert json.loads(made.pop("JSON that is no object")) == [1, 2]
    key = "messages" if chat else "prompt"
    changes = {
        "no prompt": {key: None},
        "a prompt that is a number": {key: 7},
        "max_tokens of -1": {"max_tokens": -1},
        "max_tokens in words": {"max_tokens": "many"},
        "a temperature of -1": {"temperature": -1},
        "an unknown model": {"model": "no-such-model"},
    }
    assert made.keys() == changes.keys()
    for name, change in changes.items():
        fields = json.loads(made[name])
        assert {field: fields.get(field) for field in change} == change
        assert {f: v for f, v in fields.items() if f not in change} == {
            f: v for f, v in good.items() if f not in change
        }
