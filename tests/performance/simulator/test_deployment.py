"""A model on hardware: its cache, its settings, and what is refused."""

import json
from dataclasses import replace

import pytest

from vllm_teach.engine.config import EngineConfig
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.hardware import get_hardware, hardware_names
from vllm_teach.performance.model_shapes import shape_names
from vllm_teach.performance.simulator.deployment import SETTINGS, deploy
from vllm_teach.performance.simulator.traffic import draw_traffic
from vllm_teach.performance.virtual_time import StepCost


def test_llama_2_70b_on_eight_a100_by_hand() -> None:
    deployment = deploy("llama-2-70b", "a100-80gb-sxm", tensor_parallel_size=8, swap_space=40)
    token = 2 * 80 * 8 * 128 * 2  # K and V, layers, heads, head_dim, bytes: of all devices
    assert deployment.memory.block_bytes == 16 * token // 8
    assert deployment.memory.weights == pytest.approx(69e9 * 2 / 8, rel=0.01)
    left = 0.9 * 80 * 2**30 - deployment.memory.weights - deployment.memory.activations
    assert deployment.num_blocks == int(left // deployment.memory.block_bytes)
    assert deployment.num_host_blocks == 40 * 2**30 // (16 * token)
    assert deployment.max_model_len == 4096
    assert deployment.engine == EngineConfig(
        max_num_seqs=256, swap_space=40, preemption_costs=deployment.engine.preemption_costs
    )


def test_the_settings_are_the_engines() -> None:
    given = {"max_num_seqs": 3, "block_size": 32, "num_kv_blocks": 50, "max_model_len": 100, "batching": "static"}
    deployment = deploy("tiny", "l4", **given)
    assert {name: getattr(deployment.engine, name) for name in given} == given
    assert (deployment.num_blocks, deployment.max_model_len) == (50, 100)
    assert set(SETTINGS) < set(EngineConfig.__dataclass_fields__)


def test_a_small_cache_bounds_the_length() -> None:
    assert deploy("tiny", "l4", num_kv_blocks=3).max_model_len == 48
    contiguous = deploy("tiny", "l4", num_kv_blocks=5, kv_placement="contiguous")
    assert contiguous.max_model_len == 64  # the longest run of a buddy allocator


def test_auto_weighs_the_modelled_device() -> None:
    costs = deploy("llama-2-70b", "a100-80gb-sxm", tensor_parallel_size=8).engine.preemption_costs
    assert costs is not None
    assert costs.kv_bytes_per_token == 2 * 80 * 1 * 128 * 2
    assert costs.swap_bytes_per_second == pytest.approx(0.7 * 32e9)
    # 2 FLOPs for each of 69e9 weights on eight devices, at 70 % of peak, and what else a step does.
    products = 2 * 69e9 / 8 / (0.7 * 312e12)
    assert products < costs.prefill_seconds_per_token < 2 * products
    own = replace(costs, swap_bytes_per_second=1.0)
    assert deploy("tiny", "l4", preemption_costs=own).engine.preemption_costs is own


def test_quantised_weights_leave_room_for_the_cache_and_decode_faster() -> None:
    plain, awq = (deploy("llama-2-13b", "a100-40gb-sxm", quantization=name) for name in (None, "awq"))
    assert (plain.quantization, awq.quantization) == (None, "awq")
    assert awq.num_blocks > 2 * plain.num_blocks
    workload = draw_traffic(4, (16, 32))
    assert awq.simulate(workload).seconds < plain.simulate(workload).seconds


def test_naive_attention_takes_memory_and_time() -> None:
    paged, naive = (deploy("llama-2-7b", "a100-80gb-sxm", attention=name) for name in ("paged", "naive"))
    assert naive.num_blocks < paged.num_blocks
    workload = draw_traffic(1, (2048, 1))
    assert naive.simulate(workload).seconds > 1.05 * paged.simulate(workload).seconds


def test_a_slower_link_takes_longer() -> None:
    runs = [
        deploy("llama-2-70b", "a100-80gb-sxm", tensor_parallel_size=8, link=link).simulate(draw_traffic(2, (512, 4)))
        for link in (None, "ethernet-10g")
    ]
    assert runs[1].seconds > 2 * runs[0].seconds


def test_a_sliding_window_gives_blocks_back() -> None:
    held = []
    for model in ("mistral-7b", "llama-3-8b"):  # the same layers and KV heads
        deployment = deploy(model, "a100-80gb-sxm", max_num_batched_tokens=512)
        most = 0

        def watch(start, end, plan, scheduler):
            nonlocal most
            most = max(most, scheduler.kv.pool.num_held)

        deployment.simulate(draw_traffic(1, (8000, 2)), watch=watch)
        held.append(most)
    assert held[1] == -(-8001 // 16)
    assert held[0] < (4096 + 2 * 512) // 16 + 2


def test_a_cost_of_ones_own_and_hardware_of_ones_own() -> None:
    slow = replace(get_hardware("l4"), name="slow", memory_bandwidth=1e9)
    assert deploy("tiny", slow).hardware is slow
    assert deploy("tiny", "l4", cost=StepCost(1.0, 0.0)).simulate(draw_traffic(1, (4, 3))).seconds == 3


def test_it_is_plain_data() -> None:
    plain = json.loads(json.dumps(deploy("llama-2-7b", "h100-80gb-sxm").to_json()))
    memory = plain["memory_of_a_device"]
    assert memory["weights"] + memory["activations"] + memory["kv_cache"] <= memory["usable"] < memory["total"]
    assert plain["settings"]["max_num_seqs"] == 256
    assert plain["efficiency"]["source"] == plain["cost_source"]
    given = deploy("tiny", "l4", cost=StepCost(1.0)).to_json()
    assert (given["efficiency"], given["cost_source"][:23]) == (None, "given: StepCost(step=1.")


@pytest.mark.parametrize(
    ("model", "hardware", "options", "named"),
    [
        ("llama-9", "l4", {}, "llama-9.*llama-2-70b"),
        ("tiny", "a1000", {}, "a1000.*a100-80gb-sxm"),
        ("tiny", "l4", {"max_seqs": 4}, "max_seqs is no setting.*max_num_seqs"),
        ("tiny", "l4", {"attention_backend": "sdpa"}, "attention_backend is no setting"),
        ("tiny", "l4", {"max_num_seqs": 0}, "max_num_seqs=0"),
        ("tiny", "l4", {"quantization": "int3"}, "int3.*awq"),
        ("tiny", "l4", {"dtype": "float8"}, "float8.*bfloat16"),
        ("tiny", "l4", {"attention": "flash"}, "flash.*tiled"),
        ("tiny", "l4", {"link": "rope"}, "rope.*nvlink3"),
        ("tiny", "l4", {"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ("llama-2-70b", "a100-80gb-sxm", {}, "leaves no room"),
        ("llama-2-7b", "a100-80gb-sxm", {"max_model_len": 10_000}, "max_model_len=10000"),
        ("tiny", "l4", {"preemption_mode": "swap"}, "swap_space=0"),
        ("tiny", "l4", {"dtype": "fp8"}, "dtype='fp8'.*bfloat16"),
        ("tiny", "l4", {"dtype": "fp8", "quantization": "awq"}, "dtype='fp8'.*bfloat16"),
        ("tiny", "this", {"dtype": "fp8"}, "dtype='fp8'.*bfloat16"),
        ("tiny", "l4", {"num_kv_blocks": 10**7}, r"num_kv_blocks=10000000 does not fit: .* room for 662,734 blocks"),
        ("tiny", "l4", {"swap_space": 1e-9}, "swap_space=1e-09 is less than one block"),
    ],
)
def test_what_cannot_be_deployed_is_refused(model: str, hardware: str, options: dict, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        deploy(model, hardware, **options).simulate(draw_traffic(1, (4, 4)))


def test_errors_list_all_names() -> None:
    with pytest.raises(InvalidArgumentError) as told:
        deploy("llama-2-7b", "nothing")
    assert all(name in str(told.value) for name in hardware_names())
    with pytest.raises(InvalidArgumentError) as told:
        deploy("nothing", "l4")
    assert all(name in str(told.value) for name in shape_names())


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"a request has 4097 tokens.*max_model_len is 4096"):
        deploy("llama-2-7b", "a100-80gb-sxm").simulate(draw_traffic(1, (4000, 97)))


def test_this_machine_is_what_was_measured_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from vllm_teach.performance.cost_model.efficiency import assumed_efficiency
    from vllm_teach.performance.simulator import deployment as module

    here = replace(get_hardware("rtx-4090"), name="this gpu")
    fit = SimpleNamespace(hardware=here, efficiency=assumed_efficiency(here, eager=True))
    asked = []
    monkeypatch.setattr(module, "load_fit", lambda device, dtype: asked.append(dtype) or fit)
    deployment = deploy("tiny", "this", dtype="float32")
    assert asked == ["float32"]
    assert deployment.hardware is here
    assert deployment.cost.efficiency is fit.efficiency
