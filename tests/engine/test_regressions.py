"""Mistakes that engines of this kind have made, each by its name, on the tiny model.

The oracle is always the same: what a request says in a crowded, sharing, preempting engine is what it says alone in a
roomy one without a prefix cache.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_teach import LLM, CompletionOutput, RequestOutput, SamplingParams
from vllm_teach.engine.events import Admitted, Preempted
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.request import Request, SequenceStatus
from vllm_teach.errors import PromptTooLongError
from vllm_teach.kvcache.block_table import NO_BLOCK

MakeLLM = Callable[..., LLM]
Alone = Callable[[Any, SamplingParams], list[CompletionOutput]]
Check = Callable[[LLMEngine], None]

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=28, ignore_eos=True, logprobs=0)
THREE = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, n=3)
PROMPT = list(range(10, 22))  # three blocks of 4
# Ten blocks are what one sequence of LONG needs, whose prompt has 12 tokens: the second one has to give way.
SMALL: dict[str, Any] = {"blocks": 10, "max_model_len": 40, "watermark": 0}
PREEMPTING = [SMALL, {**SMALL, "preemption_mode": "swap", "host_blocks": 20}]


@pytest.fixture
def alone(make_llm: MakeLLM) -> Alone:
    """Return what a request says in an engine of its own."""

    def run(prompt: Any, params: SamplingParams) -> list[CompletionOutput]:
        roomy = make_llm(enable_prefix_caching=False)
        return roomy.generate([prompt], params, use_tqdm=False)[0].outputs

    return run


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until all ended and return the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            return last
        last |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not come to an end")


def add(engine: LLMEngine, prompt: Any, params: SamplingParams, name: str) -> Request:
    return engine.get_request(engine.add_request(prompt, params, name))


def tokens(completions: list[CompletionOutput]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def same(ours: list[CompletionOutput], theirs: list[CompletionOutput]) -> None:
    """Check tokens, texts, ends and log-probabilities; these may differ in the last bits, by the batch's shape."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
        assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert [list(each) for each in mine.logprobs or []] == [list(each) for each in other.logprobs or []]


def step_until(engine: LLMEngine, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to this")


def held_blocks(engine: LLMEngine, request: Request) -> list[int]:
    blocks = [b for each in request.sequences if not each.finished for b in engine.kv.table(each.seq_id).blocks]
    return [block for block in blocks if block != NO_BLOCK]


def poison(engine: LLMEngine) -> None:
    """Put NaN where nothing was written yet; the last block stands for given-back ones and stays zero."""
    storage = engine.runner.storage
    storage.keys[:, : storage.num_blocks] = storage.values[:, : storage.num_blocks] = torch.nan


@pytest.mark.parametrize(("prefix_cache", "cached"), [("hash", 8), ("radix", 11)])
def test_full_prompt_prefix_hit(make_llm: MakeLLM, alone: Alone, prefix_cache: str, cached: int) -> None:
    """All of the prompt is cached, but its last token must be computed: there are no logits otherwise."""
    llm = make_llm(prefix_cache=prefix_cache)
    outputs = [llm.generate([PROMPT], GREEDY, use_tqdm=False)[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in outputs] == [0, cached, cached]
    assert [tokens(output.outputs) for output in outputs] == [tokens(alone(PROMPT, GREEDY))] * 3


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_sibling_in_the_same_step(make_llm: MakeLLM, alone: Alone, assert_empty: Check, prefix_cache: str) -> None:
    """What a step is about to compute is no hit for another sequence of that step; afterwards they share it."""
    engine = make_llm(prefix_cache=prefix_cache).engine
    poison(engine)
    requests = [add(engine, [*PROMPT, tail], GREEDY, str(tail)) for tail in (1, 2)]
    engine.step()
    assert [item.num_tokens for item in engine.last_plan.items] == [13, 13]
    assert [request.sequences[0].num_cached_tokens for request in requests] == [0, 0]
    first, second = (held_blocks(engine, request) for request in requests)
    assert first[:3] == second[:3]  # the duplicates were given back
    assert engine.kv.pool.num_held == 5
    outputs = finish(engine)
    for tail in (1, 2):
        assert tokens(outputs[str(tail)].outputs) == tokens(alone([*PROMPT, tail], GREEDY))
    assert_empty(engine)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "none"])
def test_eviction_leaves_no_stale_hash(make_llm: MakeLLM, alone: Alone, prefix_cache: str, policy: str) -> None:
    """A block that was given to another prompt is no hit for the one before, and its new content is."""
    llm = make_llm(**SMALL, prefix_cache=prefix_cache, eviction_policy=policy)
    prompts = [[first] * 25 for first in (1, 2, 3)]  # eight blocks of the ten with their output
    for prompt in [*prompts, *reversed(prompts), *prompts]:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert tokens(output.outputs) == tokens(alone(prompt, GREEDY))
        again = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert tokens(again.outputs) == tokens(output.outputs)
    assert policy == "none" or llm.engine.kv.usage().evictions > 0


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_double_free_with_shared_blocks(
    make_llm: MakeLLM, alone: Alone, assert_empty: Check, prefix_cache: str
) -> None:
    """Three hold the same blocks and end one after the other, one of them twice: nobody's blocks are freed early."""
    engine = make_llm(prefix_cache=prefix_cache).engine
    requests = {name: add(engine, [*PROMPT, 7], LONG, name) for name in "abc"}
    engine.step()
    shared = held_blocks(engine, requests["a"])[:3]
    assert [engine.kv.pool.holders(block) for block in shared] == [3, 3, 3]
    engine.abort(requests["a"])
    engine.abort(requests["a"])
    engine.abort("a")
    assert [engine.kv.pool.holders(block) for block in shared] == [2, 2, 2]
    stranger = add(engine, [99] * 30, GREEDY, "stranger")  # takes blocks that were freed
    engine.step()
    assert not set(held_blocks(engine, stranger)) & set(held_blocks(engine, requests["b"]))
    engine.abort(requests["b"])
    assert [engine.kv.pool.holders(block) for block in shared] == [1, 1, 1]
    outputs = finish(engine)
    assert tokens(outputs["c"].outputs) == tokens(alone([*PROMPT, 7], LONG))
    assert tokens(outputs["stranger"].outputs) == tokens(alone([99] * 30, GREEDY))
    assert_empty(engine)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_preempt_then_prefix_hit(make_llm: MakeLLM, alone: Alone, assert_empty: Check, prefix_cache: str) -> None:
    """A preempted sequence finds the first of its own blocks again; that it does is not counted as a hit."""
    engine = make_llm(**SMALL, prefix_cache=prefix_cache).engine
    poison(engine)
    prompts = {"a": [1] * 12, "b": [2] * 12}
    # Eight blocks each: when the first has come to its end, two of the ten still hold the beginning of the second.
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    for name, prompt in prompts.items():
        add(engine, prompt, params, name)
    outputs = finish(engine)
    assert [event.mode for event in engine.events.of(Preempted)] == ["recompute"]
    assert [event.num_cached_tokens > 0 for event in engine.events.of(Admitted) if event.resumed] == [True]
    assert engine.kv.usage().hit_tokens == 0
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 0]
    for name, prompt in prompts.items():
        assert tokens(outputs[name].outputs) == tokens(alone(prompt, params))
    assert_empty(engine)


def put_into(state: str, make_llm: MakeLLM) -> tuple[LLMEngine, Request, Request]:
    """Return an engine, a request in `state` (of sequence, or before and after a fork), and a neighbour of it."""
    limits: dict[str, Any] = {
        "waiting": {"max_num_seqs": 1},
        "running": {},
        "swapped": PREEMPTING[1],
        "before the fork": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        "after the fork": {},
        "fork in the queue": {"max_num_seqs": 3},
        "fork swapped": PREEMPTING[1],
    }[state]
    engine = make_llm(**limits).engine
    neighbour = add(engine, [2] * 12, LONG, "neighbour")
    request = add(engine, PROMPT, THREE if "fork" in state else LONG, "victim")
    first, last = request.sequences[0], request.sequences[-1]
    reached = {
        "waiting": lambda: len(neighbour.sequences[0].output_token_ids) == 2,
        "running": lambda: len(first.output_token_ids) == 2,
        "swapped": lambda: first.status is SequenceStatus.SWAPPED,
        "before the fork": lambda: 0 < first.num_computed < 12,
        "after the fork": lambda: len(last.output_token_ids) == 3,
        "fork in the queue": lambda: bool(last.output_token_ids) and last.status is SequenceStatus.WAITING,
        "fork swapped": lambda: any(each.status is SequenceStatus.SWAPPED for each in request.sequences),
    }[state]
    step_until(engine, reached)
    return engine, request, neighbour


STATES = ["waiting", "running", "swapped", "before the fork", "after the fork", "fork in the queue", "fork swapped"]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_any_state(make_llm: MakeLLM, alone: Alone, assert_empty: Check, state: str) -> None:
    """Waiting, running, swapped, with n > 1: all is freed at once, on the host too, and the neighbour goes on."""
    engine, request, neighbour = put_into(state, make_llm)
    said = [list(each.output_token_ids) for each in request.sequences]
    engine.abort(request)
    assert [each.finish_reason for each in request.sequences] == ["abort"] * len(request.sequences)
    assert [each.output_token_ids for each in request.sequences] == said
    queued = [*engine.scheduler.waiting, *engine.scheduler.running, *engine.scheduler.swapped]
    assert queued == [each for each in neighbour.sequences if not each.finished]
    assert engine.kv.pool.num_held == len(set(held_blocks(engine, neighbour)))
    assert engine.kv.usage().host_blocks_used == 0
    outputs = finish(engine)
    assert tokens(outputs["neighbour"].outputs) == tokens(alone([2] * 12, LONG))
    assert_empty(engine)


@pytest.mark.parametrize("state", STATES)
def test_what_an_abort_would_have_broken_off(make_llm: MakeLLM, alone: Alone, assert_empty: Check, state: str) -> None:
    """The same states without the abort: both requests say what they say alone."""
    engine, request, neighbour = put_into(state, make_llm)
    finish(engine)
    assert tokens(neighbour.output().outputs) == tokens(alone([2] * 12, LONG))
    assert tokens(request.output().outputs) == tokens(alone(PROMPT, request.params))
    assert_empty(engine)


@pytest.mark.parametrize("prompt", [[1] * 40, [1] * 41, [1] * 127, [1] * 5000])
def test_prompt_longer_than_the_pool(make_llm: MakeLLM, alone: Alone, assert_empty: Check, prompt: list[int]) -> None:
    """It is refused at once; 39 tokens and one new one are the most that ten blocks hold."""
    llm = make_llm(blocks=10)
    with pytest.raises(PromptTooLongError, match=f"^the prompt has {len(prompt)} tokens"):
        llm.engine.add_request(prompt, GREEDY)
    assert_empty(llm.engine)
    longest = llm.generate([[1] * 39], GREEDY, use_tqdm=False)[0]
    assert tokens(longest.outputs) == [alone([1] * 39, GREEDY)[0].token_ids[:1]]
    assert longest.outputs[0].finish_reason == "length"


def test_overlong_prompt_beside_good_ones(make_llm: MakeLLM, alone: Alone, assert_empty: Check) -> None:
    llm = make_llm(blocks=10)
    prompts = [[1, 2, 3], [1] * 60, [4, 5]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert isinstance(outputs[1].error, PromptTooLongError)
    assert str(outputs[1].error).startswith("prompts[1]: ")
    for index in (0, 2):
        assert tokens(outputs[index].outputs) == tokens(alone(prompts[index], GREEDY))
    assert_empty(llm.engine)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-4, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1e-5, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
        SamplingParams(top_p=1e-9, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(top_p=1e-60, temperature=2.0, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(top_k=1, seed=1, max_tokens=10, ignore_eos=True),
    ],
    ids=["temperature 1e-4", "temperature 1e-5", "temperature 0", "tiny top_p", "top_p of no float32", "top_k 1"],
)
def test_what_comes_down_to_the_most_likely_token(make_llm: MakeLLM, alone: Alone, params: SamplingParams) -> None:
    """The model's top two never lie within 1e-3 here, so all of these say what greedy decoding says."""
    outputs = make_llm().generate([PROMPT, PROMPT], [params, LONG], use_tqdm=False)
    expected = alone(PROMPT, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2))[0]
    assert all(
        first.logprob - second.logprob > 1e-3 for first, second in (list(each.values()) for each in expected.logprobs)
    )
    assert outputs[0].outputs[0].token_ids == expected.token_ids


def test_greedy_beside_sampled_rows(make_llm: MakeLLM, alone: Alone) -> None:
    params = [GREEDY, LONG, GREEDY, SamplingParams(temperature=1.4, top_p=0.8, seed=9, max_tokens=10)]
    prompts = [[10 + index] * 5 for index in range(4)]
    outputs = make_llm().generate(prompts, params, use_tqdm=False)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert tokens(output.outputs) == tokens(alone(prompt, each))


@pytest.mark.parametrize("limits", [{}, *PREEMPTING], ids=["roomy", "recompute", "swap"])
def test_stop_string_across_tokens(make_llm: MakeLLM, alone: Alone, limits: dict[str, Any]) -> None:
    """Every byte is a token: the text is cut where the stop string begins, two tokens back, in the stream too."""
    text = alone("x" * 12, LONG)[0].text
    stop = text[8:11]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=28, ignore_eos=True, stop=[stop])
    llm = make_llm(**limits)
    both = llm.generate(["x" * 12, "y" * 12], [params, LONG], use_tqdm=False)
    assert both[0].outputs[0].text == text[: text.find(stop)]
    assert both[0].outputs[0].stop_reason == stop
    same(both[0].outputs, alone("x" * 12, params))
    assert "".join(llm.stream("x" * 12, params)) == text[: text.find(stop)]


def test_prompt_ending_inside_a_utf8_character(make_llm: MakeLLM) -> None:
    """The output begins with the whole character, if the model completes it."""
    llm = make_llm()
    *begun, last = "a🐈".encode()
    for bias, text in ((last, "🐈"), (ord("b"), "b")):
        params = SamplingParams(temperature=0, max_tokens=1, logit_bias={bias: 100})
        for _ in range(2):  # the second time from the prefix cache
            output = llm.generate([begun], params, use_tqdm=False)[0].outputs[0]
            assert (output.token_ids, output.text) == ([bias], text)
        assert "".join(llm.stream(begun, params)) == text


@pytest.mark.parametrize("limits", [{}, {"prefix_cache": "radix"}, *PREEMPTING], ids=["hash", "radix", "small", "swap"])
@pytest.mark.parametrize("backend", ["sdpa", "naive", "auto"])
def test_nan_in_unwritten_cache_slots(make_llm: MakeLLM, alone: Alone, limits: dict[str, Any], backend: str) -> None:
    """Blocks half full, copied on write, shared, swapped, evicted: nothing reads what nobody wrote."""
    engine = make_llm(**limits, attention_backend=backend).engine
    poison(engine)
    engine.runner.storage.host.fill_(torch.nan)
    prompts = {"a": [1] * 6, "b": [1] * 6 + [2], "c": [3]}
    for name, prompt in prompts.items():
        add(engine, prompt, THREE if name == "b" else LONG, name)
    outputs = finish(engine)
    for name, prompt in prompts.items():
        assert tokens(outputs[name].outputs) == tokens(alone(prompt, THREE if name == "b" else LONG))


@pytest.mark.parametrize("limits", PREEMPTING, ids=["recompute", "swap"])
def test_last_steps_token_of_a_preempted_sequence(
    make_llm: MakeLLM, alone: Alone, assert_empty: Check, limits: dict[str, Any]
) -> None:
    """The token that was sampled just before has no K and V yet: it is neither lost nor drawn a second time."""
    engine = make_llm(**limits).engine
    requests = {name: add(engine, [ord(name)] * 12, LONG, name) for name in "abc"}
    said: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        engine.step()
        for request in requests.values():
            sequence = request.sequences[0]
            before = said.get(sequence.seq_id, [])
            assert sequence.output_token_ids[: len(before)] == before  # what is said is said
            said[sequence.seq_id] = list(sequence.output_token_ids)
            if sequence in engine.last_plan.preempted:
                assert sequence.output_token_ids == before
    assert engine.events.of(Preempted)
    for name, request in requests.items():
        same(request.output().outputs, alone([ord(name)] * 12, LONG))
    assert_empty(engine)
