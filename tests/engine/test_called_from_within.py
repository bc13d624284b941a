"""The model and the tokenizer are called in the middle of a step; what they call in turn harms nobody."""

import pytest

from vllm_teach import BeamSearchParams, SamplingParams
from vllm_teach.engine.beam_search import BeamSearch, search_beams
from vllm_teach.errors import EngineError, InvalidArgumentError

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, n=2)
CALLS = {
    "step": lambda llm: llm.engine.step(),
    "add_request": lambda llm: llm.engine.add_request([1], PARAMS),
    "generate": lambda llm: llm.generate([[1]], PARAMS, use_tqdm=False),
    "stream": lambda llm: next(llm.stream([1])),
    "reset_prefix_cache": lambda llm: llm.engine.reset_prefix_cache(),
    "beam_search": lambda llm: llm.beam_search([[1]], BeamSearchParams(2, 4), use_tqdm=False),
}


def drain(engine):
    outputs = {}
    for _ in range(100):
        if not engine.has_unfinished_requests():
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not come to an end")


@pytest.fixture
def calling(llm, monkeypatch):
    """Return a function after which decoding a token 99 calls what it is given, once for each such decoding."""
    decode = type(llm.tokenizer).decode

    def arrange(call):
        def decode_and_call(self, ids, **options):
            if 99 in ids:
                call()
            return decode(self, ids, **options)

        monkeypatch.setattr(type(llm.tokenizer), "decode", decode_and_call)

    return arrange


@pytest.mark.parametrize("name", CALLS)
def test_a_tokenizer_that_calls_the_engine_fails_its_own_request(llm, calling, name):
    expected = llm.generate([[4, 5, 6]], PARAMS, use_tqdm=False)[0].outputs
    engine = llm.engine
    engine.add_request([4, 5, 6], PARAMS, "neighbour")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, logit_bias={99: 100}, temperature=0), "caller")
    calling(lambda: CALLS[name](llm))
    outputs = drain(engine)
    message = "unfinished requests" if name == "beam_search" else "this LLM is in the middle of a step"
    assert message in str(outputs["caller"].error)
    assert isinstance(outputs["caller"].error, EngineError)
    assert outputs["neighbour"].error is None
    assert outputs["neighbour"].outputs == expected


def test_a_tokenizer_that_aborts_is_obeyed_at_the_steps_end(llm, calling):
    expected = llm.generate([[4, 5, 6]], PARAMS, use_tqdm=False)[0].outputs
    engine = llm.engine
    engine.add_request([4, 5, 6], PARAMS, "neighbour")
    caller = SamplingParams(max_tokens=5, logit_bias={99: 100}, temperature=0)
    requests = [engine.get_request(engine.add_request([1, 2, 3], caller, name)) for name in ("caller", "other")]
    calling(lambda: [engine.abort(request) for request in requests])
    outputs = drain(engine)
    assert outputs["neighbour"].outputs == expected
    assert [request.sequences[0].finish_reason for request in requests] == ["abort", "abort"]
    assert [request.sequences[0].output_token_ids for request in requests] == [[99], [99]]


def test_two_requests_never_get_one_name(llm, calling):
    """The tokenizer reads the prompt's end while a request is added."""
    calling(lambda: llm.engine.add_request([1], PARAMS, "mine"))
    with pytest.raises(EngineError, match="or of adding a request: call it afterwards"):
        llm.engine.add_request([1, 99], PARAMS, "mine")
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("name", CALLS)
def test_a_model_that_calls_the_engine_fails_its_step(llm, monkeypatch, name):
    execute, called = llm.engine.runner.execute, []

    def call_once(plan):
        if not called:
            called.append(1)
            CALLS[name](llm)
        return execute(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", call_once)
    [output] = llm.generate([[4, 5, 6]], PARAMS, use_tqdm=False, on_error="return")
    assert isinstance(output.error, EngineError)
    assert llm.generate([[4, 5, 6]], PARAMS, use_tqdm=False)[0].error is None


def test_a_chat_template_may_use_the_engine_before_the_request_is_there(llm, monkeypatch):
    """Nothing is under way then: as when one model's answer is part of another prompt."""
    template, said = type(llm.tokenizer).apply_chat_template, []

    def ask_first(self, messages):
        if not said:
            said.append(1)
            llm.generate("x", PARAMS, use_tqdm=False)
        return template(self, messages)

    conversation = [{"role": "user", "content": "hi"}]
    expected = llm.chat(conversation, PARAMS, use_tqdm=False)[0].outputs
    monkeypatch.setattr(type(llm.tokenizer), "apply_chat_template", ask_first)
    assert llm.chat(conversation, PARAMS, use_tqdm=False)[0].outputs == expected


def test_requests_beside_a_beam_search_end_or_are_told_that_there_is_no_room(make_llm):
    llm = make_llm(blocks=11, max_model_len=40, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    expected = llm.generate([[7, 8]], params, use_tqdm=False)[0].outputs
    found = []

    def ask(search):
        found.append(llm.generate([[7, 8]], params, use_tqdm=False)[0].outputs)
        if not search.beams:  # it has just ended, and holds nothing
            return
        with pytest.raises(EngineError, match="no request has room to run, as a beam search holds the KV cache"):
            llm.generate([[5] * 39], params, use_tqdm=False)

    beams = BeamSearchParams(2, 3)
    alone = llm.beam_search([[1] * 6], beams, use_tqdm=False)
    assert search_beams(llm.engine, [[1] * 6], beams, ask) == alone
    assert found == [expected] * 3
    assert llm.engine.kv.pool.num_held == 0


def test_a_beam_search_does_not_go_on_beside_requests(llm):
    search = BeamSearch(llm.engine, [[1, 2, 3]], BeamSearchParams(2, 4))
    search.step()
    name = llm.engine.add_request([1], PARAMS)
    with pytest.raises(EngineError, match="the engine has unfinished requests"):
        search.step()
    llm.engine.abort(name)
    while search.unfinished:
        search.step()
    assert search.outputs() == llm.beam_search([[1, 2, 3]], BeamSearchParams(2, 4), use_tqdm=False)


@pytest.mark.parametrize("params", [None, SamplingParams(), {"beam_width": 2}, 4])
def test_a_beam_search_takes_its_own_parameters(llm, params):
    with pytest.raises(InvalidArgumentError, match=r"^params=.* is not valid: use a BeamSearchParams\.$"):
        llm.beam_search("a", params, use_tqdm=False)
