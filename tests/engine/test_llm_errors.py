"""What `generate` does with bad prompts, failures and interrupts."""

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError, PromptTooLongError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


BAD = [
    ("", InvalidArgumentError),
    ([], InvalidArgumentError),
    ([999], InvalidArgumentError),
    ("x" * 999, PromptTooLongError),
]


@pytest.mark.parametrize(("bad", "error"), BAD)
def test_a_bad_prompt_raises_with_its_index_and_nothing_runs(llm, monkeypatch, bad, error):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a step ran"))
    with pytest.raises(error, match=r"^prompts\[1\]: "):
        llm.generate(["good", bad, "fine"], GREEDY, use_tqdm=False)


def test_bad_prompts_return_beside_good_ones(llm):
    prompts = ["good", *(bad for bad, _ in BAD), "fine"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    expected = tokens(llm.generate(["good", "fine"], GREEDY, use_tqdm=False))
    assert tokens([outputs[0], outputs[-1]]) == expected
    for index, (_, error) in enumerate(BAD, start=1):
        assert isinstance(outputs[index].error, error)
        assert f"prompts[{index}]" in str(outputs[index].error)
        assert outputs[index].finished
        assert outputs[index].outputs == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompts": ["a"], "sampling_params": [GREEDY, GREEDY]}, "2 entries for 1"),
        ({"prompts": ["a"], "sampling_params": {"top_p": 1}}, "dict"),
        ({"prompts": {"a"}}, "set"),
        ({"prompts": None}, "NoneType"),
        ({"prompts": ["a"], "on_error": "ignore"}, "on_error"),
        ({"prompts": [1, "a"]}, r"prompts\[0\]"),
    ],
)
def test_bad_calls(llm, arguments, named):
    with pytest.raises(InvalidArgumentError, match=named):
        llm.generate(**arguments)


def broken_after(llm, steps, error):
    """Make the runner raise `error` in its `steps`-th call from now on."""
    execute, calls = llm.engine.runner.execute, []

    def run(plan):
        calls.append(plan)
        if len(calls) == steps:
            raise error
        return execute(plan)

    return run


def test_a_failure_while_running(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken_after(llm, 3, RuntimeError("boom")))
        with pytest.raises(EngineError, match="boom"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert llm.engine.kv.slots_held == 0
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken_after(llm, 3, RuntimeError("boom")))
        outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=False, on_error="return")
    assert [type(output.error) for output in outputs] == [EngineError, EngineError]
    assert tokens(llm.generate("a", GREEDY, use_tqdm=False))


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken_after(llm, 4, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert llm.engine.kv.slots_held == 0
    assert not llm.engine.has_unfinished_requests()
    assert len(tokens(llm.generate("a", GREEDY, use_tqdm=False))[0]) == 10
