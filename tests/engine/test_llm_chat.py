"""`chat`: conversations as prompts, checked one by one."""

from types import SimpleNamespace

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError, PromptTooLongError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


HI = [{"role": "user", "content": "hi"}]


def test_one_conversation_or_several_as_lists_or_tuples(llm):
    output = llm.chat(HI, GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == [257, 104, 105, 258]
    for several in ([HI, HI], (tuple(HI), HI)):
        outputs = llm.chat(several, GREEDY, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == [output.outputs[0].token_ids] * 2
    assert llm.chat(tuple(HI), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("bad", [[], (), "hi", 5, None, {"role": "user", "content": "hi"}])
def test_what_is_no_list_is_refused(llm, bad):
    for on_error in ("raise", "return"):  # there is no conversation that could carry the error
        with pytest.raises(InvalidArgumentError, match=r"^messages=.* is not valid: .*\.$"):
            llm.chat(bad, on_error=on_error)


BAD = [
    [],
    ["hi"],
    [None],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": 5, "content": "hi"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "user", "content": "half \ud800"}],
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_conversation_fails_alone_and_by_its_index(llm, monkeypatch, bad):
    good, failed = llm.chat([HI, bad], GREEDY, use_tqdm=False, on_error="return")
    assert len(good.outputs[0].token_ids) == 10
    assert isinstance(failed.error, InvalidArgumentError)
    assert str(failed.error).startswith("messages[1]: ")
    assert str(failed.error).endswith(".")
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a step ran"))
    with pytest.raises(InvalidArgumentError, match=r"^messages\[1\]: "):
        llm.chat([HI, bad], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidArgumentError):
        llm.chat_prompt(bad)


def test_a_dict_between_conversations_is_named(llm):
    with pytest.raises(InvalidArgumentError, match=r"^messages\[0\]: "):
        llm.chat([HI[0], HI], GREEDY, use_tqdm=False)


def test_a_failing_or_refusing_template_is_a_typed_error(llm, monkeypatch):
    for raised, expected in ((KeyError("x"), EngineError), (PromptTooLongError("too long."), PromptTooLongError)):

        def render(messages, raised=raised):
            raise raised

        monkeypatch.setattr(llm, "tokenizer", SimpleNamespace(apply_chat_template=render))
        with pytest.raises(expected, match=r"^messages\[0\]: "):
            llm.chat(HI, GREEDY, use_tqdm=False)


def test_a_conversation_streams(llm):
    expected = llm.chat(HI, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert "".join(llm.stream(llm.chat_prompt(HI), GREEDY)) == expected
