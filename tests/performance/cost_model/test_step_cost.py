"""Modelled seconds by hand, and how they behave: more work, more devices, a slower link."""

from dataclasses import replace

import pytest

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.plan import Plan
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.models.config import ModelConfig
from vllm_teach.performance.cost_model.efficiency import Attained, Efficiency, assumed_efficiency
from vllm_teach.performance.cost_model.links import get_link
from vllm_teach.performance.cost_model.operators import OPERATORS
from vllm_teach.performance.cost_model.step_cost import ModelledStep
from vllm_teach.performance.cost_model.step_shape import Item, StepShape
from vllm_teach.performance.cost_model.weight_format import get_weight_format
from vllm_teach.performance.hardware import get_hardware
from vllm_teach.performance.model_shapes import get_model_shape

A100 = get_hardware("a100-80gb-sxm")
LLAMA = get_model_shape("llama-2-70b")
CONFIG = ModelConfig("LlamaForCausalLM", 300, 64, 160, 3, 4, 2, 16, 512)
IDEAL = Efficiency(dict.fromkeys(OPERATORS, Attained()), call=0.0, step=0.0, sequence=0.0, link=1.0, source="ideal")


def plan(*items: Item, transfers: tuple[Transfer, ...] = ()) -> Plan:
    return Plan(items=items, transfers=transfers)  # type: ignore[arg-type]


def test_a_decode_step_of_llama_2_70b_reads_its_weights() -> None:
    """By hand: 80 layers' matrices over 8 devices at 2.039 TB/s."""
    step = ModelledStep(LLAMA, A100, IDEAL, tensor_parallel_size=8)
    parts = step.parts(plan(Item(99, 1)), 16)
    matrices = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) * 2 / 8
    assert parts["linear layers"] == pytest.approx(matrices / 2.039e12, rel=1e-3)


def test_a_long_prompt_is_limited_by_arithmetic() -> None:
    step = ModelledStep(LLAMA, A100, IDEAL, tensor_parallel_size=8)
    parts = step.parts(plan(Item(0, 2048)), 16)
    flops = 2 * 2048 * 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) / 8
    assert parts["linear layers"] == pytest.approx(flops / 312e12)


def test_parts_add_up_and_are_named() -> None:
    step = ModelledStep(LLAMA, A100, tensor_parallel_size=8)
    swaps = (Transfer("swap_out", ((0, 0),)), Transfer("copy", ((1, 2),)))
    given = plan(Item(0, 100, samples=False), Item(700, 1), transfers=swaps)
    parts = step.parts(given, 16)
    assert sum(parts.values()) == step.seconds(given, 16)
    assert set(parts) == {*OPERATORS, "calls", "communication", "transfers", "step", "sequences"}
    assert all(seconds > 0 for seconds in parts.values())
    assert parts["sequences"] == 2 * step.efficiency.sequence


def test_swapped_blocks_cross_the_host_link_and_copied_ones_the_memory() -> None:
    step = ModelledStep(LLAMA, A100, IDEAL, tensor_parallel_size=8)
    block = 16 * 80 * 2 * 128 * 2

    def seconds(kind: str) -> float:
        return step.parts(plan(transfers=(Transfer(kind, ((0, 1), (2, 3))),)), 16)["transfers"]  # type: ignore[arg-type]

    assert seconds("swap_in") == seconds("swap_out") == pytest.approx(2 * block / 32e9)
    assert seconds("copy") == seconds("move") == pytest.approx(2 * 2 * block / 2.039e12)


def test_calls_cost_what_one_costs() -> None:
    shape = StepShape.of([Item(9, 1)])
    costly = replace(IDEAL, call=1.0)
    calls = sum(work.calls for work in ModelledStep(CONFIG, A100, IDEAL).operators.work(shape).values())
    assert ModelledStep(CONFIG, A100, costly).parts_of(shape, 16)["calls"] == calls


@pytest.mark.parametrize("more", [plan(Item(0, 700)), plan(Item(900, 1)), plan(Item(500, 1), Item(3, 1))])
def test_more_work_takes_longer(more: Plan) -> None:
    step = ModelledStep(LLAMA, A100, tensor_parallel_size=8)
    assert step.seconds(more, 16) > step.seconds(plan(Item(400, 1)), 16)


def test_more_devices_are_faster_over_nvlink_and_slower_over_a_network() -> None:
    given = plan(*[Item(500, 1)] * 64)
    two = ModelledStep(LLAMA, A100, tensor_parallel_size=2).seconds(given, 16)
    eight = ModelledStep(LLAMA, A100, tensor_parallel_size=8).seconds(given, 16)
    slow = ModelledStep(LLAMA, A100, tensor_parallel_size=8, link=get_link("ethernet-10g")).seconds(given, 16)
    assert eight < two < slow


def test_an_attained_share_of_the_link_counts_for_its_bandwidth_alone() -> None:
    shape = StepShape.of([Item(0, 1000)])
    seconds = [
        ModelledStep(LLAMA, A100, replace(IDEAL, link=share), tensor_parallel_size=8).parts_of(shape, 16)
        for share in (1.0, 0.5)
    ]
    calls = 161 * 14 * A100.link.latency + 7 * A100.link.latency
    whole, half = (each["communication"] - calls for each in seconds)
    assert half == pytest.approx(2 * whole)


def test_four_bits_make_decoding_faster_and_long_prompts_not() -> None:
    awq = get_weight_format("awq", "float16")
    plain, small = (ModelledStep(LLAMA, A100, IDEAL, dtype="float16", weights=w) for w in (None, awq))
    decode, prompt = plan(Item(9, 1)), plan(Item(0, 2048))
    assert small.parts(decode, 16)["linear layers"] < 0.3 * plain.parts(decode, 16)["linear layers"]
    assert small.parts(prompt, 16)["linear layers"] == plain.parts(prompt, 16)["linear layers"]


def test_another_efficiency_leaves_the_first_alone() -> None:
    step = ModelledStep(CONFIG, A100, IDEAL)
    other = step.with_efficiency(assumed_efficiency(A100))
    assert step.efficiency is IDEAL
    assert other.seconds(plan(Item(0, 5)), 16) > step.seconds(plan(Item(0, 5)), 16)


def test_it_charges_the_plans_of_a_real_engine() -> None:
    llm = LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=8)
    step = ModelledStep(llm.model.config, A100, dtype="float32")
    llm.engine.add_request({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2, ignore_eos=True))
    seconds = []
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        seconds.append(step.seconds(llm.engine.last_plan, 16))
    of_shape = [sum(step.parts_of(StepShape.of(items), 16).values()) for items in ([Item(0, 3)], [Item(3, 1)])]
    assert seconds == of_shape


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="dtype='float16' has no rate on NVIDIA A100"):
        ModelledStep(CONFIG, replace(A100, peak={"bfloat16": 1e12}), dtype="float16")
