"""An abort in the middle of a step: a forgotten stream is closed whenever the garbage collector finds it."""

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError

NEIGHBOUR = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, n=2)


@pytest.mark.parametrize("place", ["begin", "extend", "commit", "fork", "table"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_stream_that_is_closed_inside_a_step_harms_no_neighbour(llm, monkeypatch, assert_empty, place, call):
    engine = llm.engine
    expected = llm.generate([[4, 5, 6, 7, 8]], NEIGHBOUR, use_tqdm=False)[0].outputs
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    (streamed,) = engine._requests.values()
    engine.add_request([4, 5, 6, 7, 8], NEIGHBOUR, "neighbour")
    real, calls = getattr(engine.kv, place), []

    def close(*args, **options):
        calls.append(1)
        if len(calls) == call:
            stream.close()
        return real(*args, **options)

    monkeypatch.setattr(engine.kv, place, close)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["neighbour"].error is None
    assert outputs["neighbour"].outputs == expected
    assert streamed.sequences[0].finish_reason == ("abort" if len(calls) >= call else "length")
    assert_empty(engine)


@pytest.mark.parametrize("request_", [5, None, ["a"]])
def test_what_is_no_request_cannot_be_aborted(engine, request_):
    with pytest.raises(InvalidArgumentError, match=r"^request=.* is not valid: use a request or its id\.$"):
        engine.abort(request_)
