"""`chat`: conversations as prompts, checked one by one."""

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def test_chat(llm):
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == [257, 104, 105, 258]
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2
    for bad in ([], [[]], ["hi"], "hi"):
        with pytest.raises(InvalidArgumentError, match="messages"):
            llm.chat(bad)
