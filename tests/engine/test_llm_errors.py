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
    assert llm.engine.kv.pool.num_held == 0
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
    assert llm.engine.kv.pool.num_held == 0
    assert not llm.engine.has_unfinished_requests()
    assert len(tokens(llm.generate("a", GREEDY, use_tqdm=False))[0]) == 10


def test_interrupts_during_the_cleanup_leave_nothing_behind(llm, monkeypatch, assert_empty):
    """Ctrl-C pressed again and again: each abort that is interrupted has freed already, and the next one follows."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    decode, once = type(llm.tokenizer).decode, broken_after(llm, 3, KeyboardInterrupt())

    def execute(plan):
        try:
            return once(plan)
        except KeyboardInterrupt:
            monkeypatch.setattr(type(llm.tokenizer), "decode", interrupted)
            raise

    monkeypatch.setattr(llm.engine.runner, "execute", execute)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert_empty(llm.engine)
    monkeypatch.setattr(type(llm.tokenizer), "decode", decode)
    assert len(tokens(llm.generate("a", GREEDY, use_tqdm=False))[0]) == 10


def test_an_interrupt_while_requests_are_added_leaves_nothing_behind(llm, monkeypatch):
    encode = type(llm.tokenizer).encode

    def interrupted(self, text):
        if text == "b":
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(type(llm.tokenizer), "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)


def test_a_neighbours_interrupt_changes_no_seeded_stream(llm, monkeypatch):
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=30, ignore_eos=True)
    expected = "".join(llm.stream("x", params))
    pieces = llm.stream("x", params)
    said = next(pieces)
    execute, calls = llm.engine.runner.execute, []

    def interrupted_after_sampling(plan):
        result = execute(plan)
        calls.append(plan)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted_after_sampling)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", GREEDY, use_tqdm=False)
    assert said + "".join(pieces) == expected


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_a_tokenizer_that_fails_on_one_prompt_fails_that_one(llm, monkeypatch, method):
    """In encode its text, in decode the end of its ids, with which its output's text has to begin."""
    real = getattr(type(llm.tokenizer), method)

    def broken(self, what, **options):
        if what == "c" or (method == "decode" and 99 in what):
            raise KeyError("no such token")
        return real(self, what, **options)

    monkeypatch.setattr(type(llm.tokenizer), method, broken)
    outputs = llm.generate(["a", "c", [1]], SamplingParams(max_tokens=3, seed=0), use_tqdm=False, on_error="return")
    assert [type(output.error) for output in outputs] == [type(None), EngineError, type(None)]
    assert str(outputs[1].error).startswith("prompts[1]: ")
    with pytest.raises(EngineError, match=r"^prompts\[1\]: .*no such token"):
        llm.generate(["a", "c", [1]], use_tqdm=False)
    with pytest.raises(EngineError, match="no such token"):
        list(llm.stream("c"))


def test_a_stream_that_is_closed_late_aborts_no_stranger(llm):
    pieces = llm.stream("x", SamplingParams(max_tokens=20, ignore_eos=True, seed=0))
    next(pieces)
    name = next(iter(llm.engine._requests))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.engine.add_request("y", GREEDY, name)
    pieces.close()
    assert not llm.engine.get_request(name).finished
    llm.engine.abort(name)
