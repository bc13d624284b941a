"""A quantised model in the engine: the same tokens whatever is preempted, swapped or aborted; and `quantization=`."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_teach import LLM, SamplingParams
from vllm_teach.engine.events import Preempted
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.quantize import quantize_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.quantization.quantized_weight import QuantizedWeight

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def rounded(weight: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """Rounded to nearest, symmetrically, in groups of `group` inputs."""
    groups = weight.float().unflatten(1, (-1, group))  # [out, groups, group]
    scales = (groups.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
    middle = 2 ** (bits - 1)
    codes = (groups / scales.float()[..., None]).round().add(middle).clamp(0, 2**bits - 1)
    return QuantizedWeight(
        codes.flatten(1).to(torch.uint8), scales, torch.full(scales.shape, middle, dtype=torch.uint8), bits
    )


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def pair(request: pytest.FixtureRequest, tiny_model: Decoder) -> tuple[Decoder, Decoder]:
    """(quantised, plain with the dequantised weights): 4-bit layers, an int8 head and embedding."""
    quantized, plain = (Decoder(tiny_model.config).init_random(dtype=request.param) for _ in range(2))
    for name, parameter in tiny_model.named_parameters():
        module = name.removesuffix(".weight")
        if name.endswith("norm.weight"):
            continue
        weight = rounded(parameter, 4, 16) if module.endswith("_proj") else rounded(parameter, 8, 32)
        plain.get_parameter(name).data.copy_(weight.dequantize())
        quantized.put_quantized(module, weight, request.param)
    return quantized, plain


@pytest.fixture
def make(pair: tuple[Decoder, Decoder], byte_tokenizer) -> Callable[..., LLM]:
    """make(model=None, blocks=150, host_blocks=0, **limits) -> LLM around the quantised model, or another."""

    def build(model: Decoder | None = None, blocks: int = 150, host_blocks: int = 0, **limits) -> LLM:
        model = model or pair[0]
        limits = {"block_size": 4, "num_kv_blocks": blocks, "attention_backend": "sdpa", **limits}
        block_bytes = 4 * model.config.kv_bytes_per_token(model.dtype.itemsize)
        return LLM.from_loaded(model, byte_tokenizer, swap_space=host_blocks * block_bytes / 2**30, **limits)

    return build


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def requests(count=12):
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"temperature": 1.5, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 3},
    ]
    return prompts, [SamplingParams(max_tokens=rng.randint(5, 19), **kinds[i % 4]) for i in range(count)]


def test_the_tokens_are_those_of_the_dequantised_model(make, pair):
    if pair[0].dtype != torch.float32:
        pytest.skip("two roundings to bfloat16 may choose two tokens")
    prompts, params = requests()
    found, expected = (tokens(make(model).generate(prompts, params, use_tqdm=False)) for model in pair)
    assert found == expected
    assert len({tuple(each) for each in found}) == 12


def test_the_same_batch_gives_the_same_bits(make):
    prompts, params = requests()
    params = [replace(each, logprobs=2) for each in params]
    first, second = (make().generate(prompts, params, use_tqdm=False) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert [output.outputs[0].cumulative_logprob for output in first] == [
        output.outputs[0].cumulative_logprob for output in second
    ]


TIGHT = {
    "recompute": {"blocks": 15},
    "swap": {"blocks": 15, "preemption_mode": "swap", "host_blocks": 40},
    "auto, radix": {"blocks": 15, "preemption_mode": "auto", "host_blocks": 40, "prefix_cache": "radix"},
    "contiguous": {"blocks": 16, "kv_placement": "contiguous", "preemption_mode": "swap", "host_blocks": 40},
    "no prefix cache": {"blocks": 15, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("case", TIGHT)
def test_preemption_keeps_the_books_and_in_float32_the_tokens(case, make, pair, assert_empty):
    prompts, params = requests()
    llm = make(**TIGHT[case], max_model_len=60)
    found = tokens(llm.generate(prompts, params, use_tqdm=False))
    assert llm.engine.events.of(Preempted)
    assert_empty(llm.engine)
    if pair[0].dtype == torch.float32:
        assert found == tokens(make(max_model_len=60).generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_aborts_leave_nothing_behind(make, assert_empty, preemption_mode):
    engine = make(blocks=15, host_blocks=20, preemption_mode=preemption_mode, max_model_len=60).engine
    prompts, params = requests()
    names = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    rng = random.Random(1)
    rng.shuffle(names)
    while engine.has_unfinished_requests():
        engine.step()
        if names:
            engine.abort(names.pop())
    assert_empty(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, its weights rounded to 4 bits, embedding and head to 8."""
    path = tmp_path_factory.mktemp("quantized") / "tiny"
    quantize_model(resolve_model("tiny"), path, QuantizationConfig("rtn", 4, 64, head_bits=8), progress=False)
    return path


@pytest.mark.parametrize("quantization", [None, "rtn"])
def test_llm_loads_what_the_files_say(folder, quantization):
    llm = LLM(folder, quantization=quantization, num_kv_blocks=20)
    assert len(tokens(llm.generate("Once upon a time", GREEDY, use_tqdm=False))[0]) == 10
    assert "bits=4" in repr(llm.model)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("rtn", {"quantization": "awq"}, r"quantization='awq' does not fit model='.*', which was quantised by 'rtn'"),
        ("tiny", {"quantization": "gptq"}, r"quantization='gptq' .*'tiny', which is not quantised: .*vllm-teach quant"),
        ("tiny", {"quantization": "fp4"}, r"quantization='fp4' is not valid: use 'gptq' or 'awq' or 'rtn' or 'int8'"),
        ("tiny", {"quantization": 4}, r"quantization=4 is not valid"),
        ("rtn", {"hf": True}, r"hf=True does not fit model='.*', whose weights are quantised by 'rtn'"),
        ("tiny", {"hf": True, "quantization": "awq"}, r"quantization='awq' .* is not quantised"),
    ],
)
def test_what_does_not_match_is_refused_before_anything_is_loaded(folder, model, arguments, message, monkeypatch):
    monkeypatch.setattr("vllm_teach.engine.llm.load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(InvalidArgumentError, match=message):
        LLM(folder if model == "rtn" else model, **arguments)
