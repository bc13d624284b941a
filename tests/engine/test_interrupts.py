"""Ctrl-C inside a step: nothing is lost, nothing is left, and all goes on as if there had been none."""

import pytest

from vllm_teach import SamplingParams

LONG = SamplingParams(max_tokens=50, ignore_eos=True)


def test_an_abort_after_an_interrupted_step_frees_first_too(engine, monkeypatch):
    """Then a sampled token still waits for its text."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    engine.add_request("x", LONG, "a")
    request = engine.get_request("a")
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.tokenizer), "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert request.sequences[0].new_token is not None
        with pytest.raises(KeyboardInterrupt):
            engine.abort("a")
    assert request.finished
    assert engine.kv.slots_held == 0


def interrupted_once(engine, monkeypatch, place, call):
    """Raise KeyboardInterrupt in the `call`-th call of the place; after it, in place of doing anything (decode)."""
    calls = []
    if place == "after execute":
        execute = engine.runner.execute

        def run(plan):
            result = execute(plan)
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(engine.runner, "execute", run)
    else:
        decode = type(engine.tokenizer).decode

        def run(self, ids, skip_special_tokens=True):
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return decode(self, ids, skip_special_tokens)

        monkeypatch.setattr(type(engine.tokenizer), "decode", run)
    return calls


@pytest.mark.parametrize("place", ["after execute", "decode"])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 13, 20])
def test_after_an_interrupt_all_goes_on_as_if_there_had_been_none(make_llm, monkeypatch, assert_empty, place, call):
    """Seeded and greedy, with stop strings, log-probabilities and siblings: same tokens, same texts, same ends."""
    kinds = [
        SamplingParams(temperature=1.0, seed=2, max_tokens=12, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=9, n=2, stop=["e", "\x1b"]),
        SamplingParams(temperature=1.5, seed=4, max_tokens=12, stop=[chr(code) for code in range(32, 80)]),
    ]

    def run(interrupt):
        engine = make_llm().engine
        for index, params in enumerate(kinds):
            engine.add_request("aé", params, str(index))
        last, interrupts = {}, 0
        with monkeypatch.context() as patch:
            calls = interrupted_once(engine, patch, place, call) if interrupt else []
            while engine.has_unfinished_requests():
                try:
                    last |= {output.request_id: output for output in engine.step()}
                except KeyboardInterrupt:
                    interrupts += 1
            assert interrupts == (interrupt and len(calls) >= call)
        assert_empty(engine)
        return {name: output.outputs for name, output in last.items()}

    assert run(interrupt=True) == run(interrupt=False)
