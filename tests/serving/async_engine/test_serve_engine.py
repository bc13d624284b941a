"""From loading a model to the end of its loop: what the server is told of it."""

from contextlib import nullcontext
from queue import SimpleQueue

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import EngineDeadError, ModelNotFoundError
from vllm_teach.serving.async_engine.engine_loop import serve_engine
from vllm_teach.serving.async_engine.messages import AddRequest, EngineFailed, EngineReady, EngineUpdate, StopEngine


def test_serving_begins_with_what_is_to_know_and_ends_with_stop(tiny_llm):
    inbox, sent = SimpleQueue(), []
    prompt = {"prompt_token_ids": [5, 6, 7], "prompt": None, "cache_salt": None}
    for message in (AddRequest("a", prompt, SamplingParams(max_tokens=1)), StopEngine()):
        inbox.put(message)
    serve_engine(lambda: nullcontext(tiny_llm), "tiny", inbox, sent.append)
    ready, beginning, update = sent
    shape = tiny_llm.model.config
    assert isinstance(ready, EngineReady)
    assert (ready.model, ready.dtype, ready.device, ready.num_blocks, ready.block_size) == (
        "tiny",
        "float32",
        "cpu",
        200,
        4,
    )
    assert (ready.vocab_size, ready.max_model_len) == (shape.vocab_size, tiny_llm.engine.max_model_len)
    assert (beginning.deltas, beginning.report.generation_tokens) == ((), 0)
    assert isinstance(update, EngineUpdate)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(ModelNotFoundError("no such model: check."), ModelNotFoundError), (RuntimeError("x"), EngineDeadError)],
)
def test_what_fails_in_loading_is_told(raised, kind):
    def load():
        raise raised

    sent = []
    serve_engine(load, "tiny", SimpleQueue(), sent.append)
    assert [type(each) for each in sent] == [EngineFailed]
    assert type(sent[0].error) is kind
    assert str(raised) in str(sent[0].error)
