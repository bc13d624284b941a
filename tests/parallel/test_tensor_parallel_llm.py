"""An LLM over several ranks answers as one rank does, whatever happens to its cache, and shows what it sent."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_teach import LLM, BeamSearchParams, SamplingParams
from vllm_teach.errors import InvalidArgumentError

TEXTS = ["The cat sat on the", "One day,", "Once upon a time there was a", "1 2 3 4", "a"]
TOKENS = [[7 * i % 2048 for i in range(start, start + 20)] for start in (1, 50, 90, 400)]
COMMON = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "max_num_seqs": 8, "attention_backend": "sdpa"}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

Make = Callable[..., tuple[LLM, LLM]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Make]:
    """pair(model, size, **arguments) -> (one rank, `size` ranks) of the same model; all are closed at the end."""
    made: dict[Any, tuple[LLM, LLM]] = {}
    threads = torch.get_num_threads()

    def make(model: Any = "tiny", size: int = 2, **arguments: Any) -> tuple[LLM, LLM]:
        key = (model, size, tuple(arguments.items()))
        if key not in made:
            limits = {**COMMON, **arguments}
            made[key] = (LLM(model, **limits), LLM(model, tensor_parallel_size=size, **limits))
        return made[key]

    yield make
    for _, llm in made.values():
        llm.close()
    torch.set_num_threads(threads)


def tokens(llm: LLM, prompts: list, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.kv.usage().held_blocks == 0
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=16, n=3),
        SamplingParams(temperature=1.0, max_tokens=12, min_p=0.01, repetition_penalty=1.2, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "penalty"],
)
def test_tokens_equal_one_rank(pair: Make, params: SamplingParams) -> None:
    one, two = pair()
    assert tokens(two, TEXTS, params) == tokens(one, TEXTS, params)


@pytest.mark.parametrize("size", [2, 3])
def test_uneven_parts(pair: Make, model_folder, size: int) -> None:
    one, several = pair(model_folder(), size)
    assert tokens(several, TOKENS) == tokens(one, TOKENS)


def test_logprobs_of_answers_and_prompts(pair: Make) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=4, prompt_logprobs=3)
    one, two = (llm.generate(TOKENS, params, use_tqdm=False) for llm in pair())
    for a, b in zip(one, two, strict=True):
        rows = zip(
            [*a.prompt_logprobs[1:], *a.outputs[0].logprobs],
            [*b.prompt_logprobs[1:], *b.outputs[0].logprobs],
            strict=True,
        )
        for expected, found in rows:
            assert expected.keys() == found.keys()
            for token in expected:
                assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_beam_search(pair: Make) -> None:
    one, two = (
        llm.beam_search(TEXTS[:3], BeamSearchParams(beam_width=3, max_tokens=8), use_tqdm=False) for llm in pair()
    )
    assert [[each.tokens for each in out.sequences] for out in two] == [
        [each.tokens for each in out.sequences] for out in one
    ]


def test_a_stream_that_is_left(pair: Make) -> None:
    one, two = pair()
    stream = two.stream(TEXTS[0], GREEDY)
    next(stream)
    stream.close()
    assert "".join(two.stream(TEXTS[0], GREEDY)) == "".join(one.stream(TEXTS[0], GREEDY))


@pytest.mark.parametrize(
    "arguments",
    [
        {"preemption_mode": "swap", "swap_space": 0.01},
        {"preemption_mode": "recompute", "prefix_cache": "radix"},
        {"preemption_mode": "swap", "swap_space": 0.01, "kv_cache_dtype": "int8", "kv_placement": "prefer_contiguous"},
    ],
    ids=["swap", "recompute", "int8"],
)
def test_preempted_and_brought_back(pair: Make, arguments: dict) -> None:
    """Three sequences of 36 tokens in room for two of them, each prompt there twice for the prefix cache."""
    one, two = pair(num_kv_blocks=24, block_size=4, watermark=0, **arguments)
    prompts = [ids for ids in TOKENS[:3] for _ in range(2)]
    plenty = pair(num_kv_blocks=500, block_size=4, kv_cache_dtype=arguments.get("kv_cache_dtype", "auto"))[0]
    assert tokens(two, prompts) == tokens(one, prompts) == tokens(plenty, prompts)
    usage = two.engine.kv.usage()
    if arguments["preemption_mode"] == "swap":
        assert usage.swapped_in > 0
    else:
        assert two.engine.scheduler.preemptions["recompute"] > 0
    assert tokens(two, prompts[:1]) == tokens(two, prompts[:1]) == tokens(plenty, prompts[:1])
    assert two.engine.kv.usage().hit_tokens > 0


def test_swap_files_are_each_ranks_own(pair: Make, tmp_path) -> None:
    arguments = {"num_kv_blocks": 24, "block_size": 4, "watermark": 0, "preemption_mode": "swap", "swap_space": 0.001}
    llm = LLM("tiny", tensor_parallel_size=2, swap_file=tmp_path / "swap", **COMMON, **arguments)
    try:
        assert tokens(llm, TOKENS) == tokens(pair()[0], TOKENS)
        assert llm.engine.kv.usage().swapped_in > 0
        assert (tmp_path / "swap").stat().st_size == (tmp_path / "swap.rank1").stat().st_size > 0
    finally:
        llm.close()


def test_weights_and_cache_are_divided(pair: Make) -> None:
    one, two = pair(num_kv_blocks=32)
    assert two.model.num_bytes() <= 0.51 * one.model.num_bytes()
    ours, whole = two.engine.runner.storage, one.engine.runner.storage
    assert ours.num_blocks == whole.num_blocks
    assert 2 * ours.keys.nbytes == whole.keys.nbytes


def test_all_reduced_bytes_per_token(pair: Make) -> None:
    """Two sums a layer and the embedding's, each of a hidden state: (2 · 4 + 1) · 256 · 4 bytes on `tiny`."""
    _, two = pair(enable_prefix_caching=False)
    traffic = two.model.group.traffic["all_reduce"]
    before = (traffic.calls, traffic.num_bytes)
    two.generate([TOKENS[0]], GREEDY, use_tqdm=False)
    steps, computed = GREEDY.max_tokens, len(TOKENS[0]) + GREEDY.max_tokens - 1
    assert traffic.calls - before[0] == 9 * steps
    assert traffic.num_bytes - before[1] == 9 * 256 * 4 * computed


def test_two_llms_with_ranks_of_their_own_at_once(pair: Make, model_folder) -> None:
    _, first = pair()
    one, second = pair(model_folder(), 2)
    expected = tokens(first, TOKENS)
    assert tokens(second, TOKENS) == tokens(one, TOKENS)
    assert tokens(first, TOKENS) == expected


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^tensor_parallel_size=.* is not valid: use a whole number from 1"):
        LLM("tiny", tensor_parallel_size=size)


def test_what_cannot_be_split_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_teach.engine.llm.load_over_ranks", None)
    with pytest.raises(InvalidArgumentError, match=r"^tensor_parallel_size=3 .* 2 KV heads .* so use 1 to 2"):
        LLM("tiny", tensor_parallel_size=3)
    with pytest.raises(InvalidArgumentError, match=r"^tensor_parallel_size=2 is not valid: transformers' models"):
        LLM("tiny", tensor_parallel_size=2, hf=True)
    with pytest.raises(InvalidArgumentError, match=r"^distributed_timeout_seconds=0 is not valid"):
        LLM("tiny", tensor_parallel_size=2, distributed_timeout_seconds=0)
