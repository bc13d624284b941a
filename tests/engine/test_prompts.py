"""The forms of a prompt and of a list of prompts."""

import numpy as np
import pytest

from vllm_teach.engine.prompts import list_conversations, list_prompts, read_prompt, render_chat
from vllm_teach.errors import EngineError, InvalidArgumentError


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("ab", "ab", [97, 98]),
        ([1, 2], None, [1, 2]),
        ((1, 2), None, [1, 2]),
        ([np.int64(1), np.int32(2)], None, [1, 2]),
        ({"prompt": "ab"}, "ab", [97, 98]),
        ({"prompt_token_ids": (3,)}, None, [3]),
        ({"prompt_token_ids": [3], "prompt": "its text"}, "its text", [3]),
    ],
)
def test_forms(byte_tokenizer, prompt, text, ids):
    read = read_prompt(prompt, byte_tokenizer, 259)
    assert read == {"prompt": text, "prompt_token_ids": ids, "cache_salt": None}
    assert all(type(token_id) is int for token_id in read["prompt_token_ids"])
    assert read_prompt(read, byte_tokenizer, 259) == read


def test_a_salt_goes_with_the_ids(byte_tokenizer):
    read = read_prompt({"prompt": "ab", "cache_salt": "mine"}, byte_tokenizer, 259)
    assert read == {"prompt": "ab", "prompt_token_ids": [97, 98], "cache_salt": "mine"}
    assert read_prompt(read, byte_tokenizer, 259) == read


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([1, -1], "-1"),
        ([259], "259"),
        ([1, "a"], "'a'"),
        ([True], "True"),
        ([1.0], "1.0"),
        (None, "NoneType"),
        (7, "int"),
        (b"ab", "bytes"),
        ({}, r"keys \[\]"),
        ({"text": "a"}, "text"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompt": 5}, "'prompt' with a text"),
        ({"prompt_token_ids": "ab"}, "str"),
        ({"prompt_token_ids": [1], "prompt": 5}, "'prompt' with a text"),
        ("bad \ud800 half", "no valid text"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt=''"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt=5"),
        ({"cache_salt": "s"}, "'prompt' with a text"),
    ],
)
def test_bad_prompts(byte_tokenizer, prompt, named):
    with pytest.raises(InvalidArgumentError, match=named) as caught:
        read_prompt(prompt, byte_tokenizer, 259)
    assert str(caught.value).endswith(".")


def test_a_text_with_ids_that_the_model_does_not_have(byte_tokenizer):
    with pytest.raises(InvalidArgumentError, match="98"):
        read_prompt("ab", byte_tokenizer, 98)


def test_an_unusual_exception_of_the_tokenizer_is_a_typed_error(byte_tokenizer, monkeypatch):
    def broken(self, text):
        raise KeyError("no such piece")

    monkeypatch.setattr(type(byte_tokenizer), "encode", broken)
    with pytest.raises(EngineError, match="no such piece") as caught:
        read_prompt("ab", byte_tokenizer, 259)
    assert isinstance(caught.value.__cause__, KeyError)


def test_lists():
    assert list_prompts("a") == ["a"]
    assert list_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert list_prompts([1, np.int64(2)]) == [[1, 2]]
    assert list_prompts(["a", [1], {"prompt": "b"}]) == ["a", [1], {"prompt": "b"}]
    assert list_prompts(()) == []
    message = {"role": "user", "content": "hi"}
    assert list_conversations([message]) == [[message]]
    assert list_conversations([[message], (message,)]) == [[message], (message,)]


def test_ids_mixed_with_another_number_are_one_bad_prompt(byte_tokenizer):
    [prompt] = list_prompts([1, 2.0])
    with pytest.raises(InvalidArgumentError, match=r"^the prompt mixes token ids with 2\.0, "):
        read_prompt(prompt, byte_tokenizer, 259)


@pytest.mark.parametrize("error", [UnicodeError("odd"), TypeError("must be str")])
def test_half_of_a_surrogate_pair_is_named_by_its_position(byte_tokenizer, monkeypatch, error):
    """The tokenizers library says TypeError, without a position; one for another reason is not blamed on the text."""

    def refuse(self, what):
        raise error

    monkeypatch.setattr(type(byte_tokenizer), "encode", refuse)
    monkeypatch.setattr(type(byte_tokenizer), "apply_chat_template", refuse)
    bad = "x" * 1000 + "\ud800"
    with pytest.raises(InvalidArgumentError, match="the prompt is no valid text: position 1000 ") as caught:
        read_prompt(bad, byte_tokenizer, 259)
    assert len(str(caught.value)) < 250
    with pytest.raises(InvalidArgumentError, match="the conversation is no valid text: position 1000 "):
        render_chat([{"role": "user", "content": bad}], byte_tokenizer)
    with pytest.raises(InvalidArgumentError if isinstance(error, UnicodeError) else EngineError, match=str(error)):
        read_prompt("sound", byte_tokenizer, 259)
