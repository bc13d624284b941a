"""NumPy's numbers are taken for what they say: those of few bits would overflow in the engine's sums."""

import numpy as np
import pytest

from vllm_teach import LLM, SamplingParams
from vllm_teach.engine.beam_params import BeamSearchParams
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import InvalidArgumentError


def test_short_integers_do_not_overflow(tiny_model, byte_tokenizer):
    limits = {"block_size": 4, "num_kv_blocks": 100, "max_num_seqs": 9, "max_events": 7}
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, **{name: np.int8(value) for name, value in limits.items()})
    params = SamplingParams(max_tokens=np.int8(40), ignore_eos=True, seed=np.uint8(2), stop_token_ids=[np.int16(250)])
    plain = SamplingParams(max_tokens=40, ignore_eos=True, seed=2, stop_token_ids=[250])
    prompts = [[1] * 100]  # 100 + 40 is more than an int8 holds
    generated, expected = (llm.generate(prompts, each, use_tqdm=False)[0].outputs for each in (params, plain))
    assert generated == expected
    beams = [
        llm.beam_search([[1] * 90], BeamSearchParams(width(2), width(30)), use_tqdm=False)[0].sequences[0].tokens
        for width in (np.int8, int)
    ]
    assert beams[0] == beams[1]


@pytest.mark.parametrize(
    "settings",
    [
        SamplingParams(n=np.int8(2), temperature=np.float16(0.5), top_k=np.int8(5), logprobs=np.int8(1)),
        BeamSearchParams(np.int8(2), np.int8(3), length_penalty=np.float32(0.5)),
        EngineConfig(seed=np.int64(3), watermark=np.float32(0.25)),
        SchedulerConfig(max_num_seqs=np.int8(100), watermark=np.float32(0.25)),
        PreemptionCosts(kv_bytes_per_token=np.int32(9)),
    ],
)
def test_fields_hold_python_numbers(settings):
    assert not [value for value in vars(settings).values() if isinstance(value, np.generic)]


@pytest.mark.parametrize("name", ["kv_placement", "prefix_cache", "eviction_policy", "scheduling_policy", "batching"])
def test_an_array_is_no_choice(name):
    with pytest.raises(InvalidArgumentError, match=f"^{name}=.* is not valid: use "):
        EngineConfig(**{name: np.array(["lru", "fcfs"])})


def test_more_events_than_a_deque_can_count_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"^max_events=1000.* is not valid: use a whole number from 1 to "):
        EngineConfig(max_events=10**30)


@pytest.mark.parametrize("penalty", [10**30, -(10**30), 1e30, -1e30])
def test_a_length_penalty_beyond_float64_is_refused(penalty):
    """A whole number would be computed digit by digit and never end; a float overflows in the middle of a search."""
    with pytest.raises(InvalidArgumentError, match=r"^length_penalty=.* is not valid: use a number from -32 to 32\.$"):
        BeamSearchParams(2, 2, length_penalty=penalty)


@pytest.mark.parametrize(
    "name",
    [
        *("kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed", "block_size"),
        *("num_kv_blocks", "swap_space", "long_prefill_token_threshold"),
    ],
)
@pytest.mark.parametrize("value", [10**5000, -(10**5000), 10**20], ids=["10**5000", "-10**5000", "10**20"])
def test_a_number_too_long_to_print_is_taken_or_refused(tiny_model, byte_tokenizer, name, value):
    """Python prints no whole number of more than 4,300 digits, so a message with one in it is an error itself."""
    limits = ({} if name in ("kv_cache_memory_bytes", "num_kv_blocks") else {"num_kv_blocks": 9}) | {name: value}
    if value > 0 and name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        llm = LLM.from_loaded(tiny_model, byte_tokenizer, **limits)
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
        return
    with pytest.raises(InvalidArgumentError, match=rf"^({name}|max_num_batched_tokens|num_kv_blocks)=") as caught:
        LLM.from_loaded(tiny_model, byte_tokenizer, **limits)
    assert len(str(caught.value)) < 400


def test_a_minimum_above_a_maximum_too_long_to_print():
    with pytest.raises(InvalidArgumentError, match=r"^min_tokens=.* is not valid: use at most max_tokens, which is "):
        SamplingParams(max_tokens=10**5000, min_tokens=10**5000 + 1)


def test_more_beams_than_can_be_printed(make_llm):
    with pytest.raises(InvalidArgumentError, match=r"^beam_width=.* is not valid: each beam is a sequence"):
        make_llm().beam_search("a", BeamSearchParams(10**5000, 4), use_tqdm=False)
    roomy = make_llm(max_num_seqs=10**5000, max_num_batched_tokens=10**5000)
    with pytest.raises(InvalidArgumentError, match=r"^prompts\[0\]: .* beams of 5 tokens may need "):
        roomy.beam_search("a", BeamSearchParams(10**5000, 4), use_tqdm=False)
