"""`generate`: which tokens come, in which order, whatever the limits."""

import random

import numpy as np
import pytest

from vllm_teach import SamplingParams
from vllm_teach.engine.uncached import generate_without_cache
from vllm_teach.errors import InvalidArgumentError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_cache_gives_what_recomputing_gives(llm, tiny_model):
    seen = []
    prompt = [7, 8, 9]
    expected = generate_without_cache(tiny_model, prompt, 10, lambda count, seconds: seen.append(count))
    assert tokens(llm.generate([prompt], GREEDY, use_tqdm=False)) == [expected]
    assert seen == list(range(3, 13))
    assert len(set(expected)) > 3
    with pytest.raises(InvalidArgumentError, match="empty"):
        generate_without_cache(tiny_model, [], 1)


def test_forms_of_prompts_and_their_order(llm):
    assert llm.generate([]) == []
    one = llm.generate("abc", GREEDY, use_tqdm=False)
    assert (one[0].prompt, one[0].prompt_token_ids) == ("abc", [97, 98, 99])
    assert tokens(llm.generate([97, 98, 99], GREEDY, use_tqdm=False)) == tokens(one)
    mixed = llm.generate(["abc", [1, 2], "z"], [GREEDY, SamplingParams(max_tokens=2), GREEDY], use_tqdm=False)
    assert [output.prompt for output in mixed] == ["abc", None, "z"]
    assert tokens(mixed)[0] == tokens(one)[0]
    assert len(tokens(mixed)[1]) <= 2


def test_dicts_and_numpy_numbers(llm):
    expected = tokens(llm.generate("abc", GREEDY, use_tqdm=False))
    for prompt in ({"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}, [np.int64(id) for id in (97, 98, 99)]):
        assert tokens(llm.generate(prompt, GREEDY, use_tqdm=False)) == expected
        assert tokens(llm.generate([prompt, "z"], GREEDY, use_tqdm=False))[:1] == expected
    assert llm.generate({"prompt": "abc"}, GREEDY, use_tqdm=False)[0].prompt == "abc"


def test_each_text_is_tokenised_once(llm, monkeypatch):
    encode, texts = type(llm.tokenizer).encode, []
    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda self, text: (texts.append(text), encode(self, text))[1])
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    list(llm.stream("c", GREEDY))
    assert texts == ["a", "b", "c"]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"max_num_seqs": 64},
        {"blocks": 28, "max_model_len": 60},
        {"blocks": 15, "max_model_len": 60, "preemption_mode": "swap", "host_blocks": 12},
        {"blocks": 15, "max_model_len": 60, "preemption_mode": "auto", "host_blocks": 40, "prefix_cache": "radix"},
        {"block_size": 1, "blocks": 70, "kv_placement": "contiguous", "long_prefill_token_threshold": 7},
        {"block_size": 16, "blocks": 16, "kv_placement": "prefer_contiguous", "eviction_policy": "fifo"},
        {"blocks": 30, "batching": "static", "max_num_seqs": 4},
        {"blocks": 30, "batching": "prefill_first", "enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"scheduling_policy": "priority", "max_num_seqs": 4, "enable_prefix_caching": False},
        {"target_inter_token_latency": 1e-4, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        {"attention_backend": "naive"},
        {"attention_backend": "tiled"},
        {"attention_backend": "memory_efficient"},
        {"attention_backend": "auto"},
    ],
)
def test_batching_and_limits_change_no_token(make_llm, limits):
    """Greedy, seeded and penalised requests, each alone and all together under various limits, in float32."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"temperature": 1.5, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 3},
    ]
    params = [SamplingParams(max_tokens=rng.randint(1, 19), **kinds[i % 4]) for i in range(12)]
    single = make_llm(max_model_len=60)
    expected = [tokens(single.generate([p], each, use_tqdm=False))[0] for p, each in zip(prompts, params, strict=True)]
    llm = make_llm(**{"max_model_len": 60, **limits})
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert llm.engine.kv.pool.num_held == llm.engine.kv.usage().host_blocks_used == 0
    assert len({tuple(each) for each in expected}) == 12


def test_engine_seed_drives_unseeded_requests(make_llm):
    params = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)

    def run(seed):
        llm = make_llm(seed=seed)
        return [tokens(llm.generate(["a", "a"], params, use_tqdm=False)) for _ in range(2)]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert first[0][0] != first[0][1]  # two requests draw different numbers
    assert first[0] != first[1]


def test_many_more_requests_than_places(make_llm):
    llm = make_llm(blocks=8 * 4)  # 14 tokens each
    outputs = llm.generate([[i % 250 + 1] * 4 for i in range(200)], GREEDY, use_tqdm=False)
    assert all(len(each) == 10 for each in tokens(outputs))
    times = [output.metrics.first_scheduled_time for output in outputs]
    assert times == sorted(times)
