"""Experiments that need no clock, on the real code, each beside a figure found another way."""

import math
from types import SimpleNamespace

import pytest

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.check import Check
from vllm_teach.validation.audit.experiment import load_experiments
from vllm_teach.validation.audit.experiments import (
    bottleneck,
    memory_advice,
    scheduling_advice,
    selection,
    troubleshooting,
)
from vllm_teach.validation.audit.finding import counted
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.run import RowAudit, audit_row
from vllm_teach.validation.audit.verdict import CONFIRMED, CONTRADICTED, PARTLY, judge


def run(table_id: str, key: str) -> tuple[dict[str, float], RowAudit]:
    row = audit_row(load_experiments().get(table_id, key), Lab(quick=True))
    assert row.stopped is None
    checks = [check for check in row.experiment.checks if isinstance(check, Check)]
    needed = {check.finding for check in checks if not check.optional}
    found = {finding.name: finding.value for finding in row.findings}
    assert needed <= set(found)
    return found, row


def test_the_bandwidth_row_contradicts_the_mechanism() -> None:
    found, row = run("B-flash-attention", "bandwidth_gb_s")
    assert found["bytes by the rows, baseline / optimised"] == pytest.approx((185 * 580) / (62 * 1580))
    n, d = 2048, 128
    naive = 4 * n * d + 4 * n * n  # q, k, v, out; S and P, each written and read; elements of one head
    tiles = n // 128
    tiled = 2 * n * d + tiles * 2 * n * d  # q and out once, k and v once for each of the 16 rows of tiles
    assert found["bytes counted, naive / tiled, no mask"] == pytest.approx(naive / tiled, rel=0.01)
    assert row.verdict.verdict == CONTRADICTED


def test_the_largest_batch_is_what_is_left_of_the_memory() -> None:
    found, row = run("B-bottleneck", "max_batch@2048")
    pair = 2 * 32 * 2048**2 * 2
    assert found["A100 40GB, one layer's scores are held"] == math.floor((40e9 - 13.5e9) / pair) == 49
    assert found["A100 80GB, all 32 layers' are"] == math.floor((80e9 - 13.5e9) / (32 * pair)) == 3
    assert row.verdict.verdict == PARTLY


def test_two_hundred_billion_parameters_are_400_gb() -> None:
    found, row = run("B-motivation", "a_200b_parameter_dialogue_model_15_s_per")
    assert found["weights in float16"] == 400
    assert row.verdict.verdict == PARTLY
    assert "how many tokens" in row.verdict.missing[0]


def test_torch_2_0_1_is_older_than_what_vllm_0_2_4_asks_for() -> None:
    _, row = run("A-deployment", "python_3.9_vllm_0.2.4_with_torch_2.0.1")
    assert row.verdict.verdict == CONTRADICTED


def test_the_configuration_fits() -> None:
    found, row = run("A-deployment", "llm_model_llama_2_70b_chat_tensor_parallel_size")
    usable = 0.9 * 80 * 2**30
    assert found["weights of a device / its usable memory"] == pytest.approx(2 * 68.98e9 / 8 / usable, rel=0.01)
    assert row.verdict.verdict == CONFIRMED


def test_a_gauge_is_wrong_at_some_moment() -> None:
    found, row = run("A-deployment", "metrics_as_gauges_vllm_tokens_per_sec_vllm_mem")
    assert found["gauges of these names"] == 1
    # Bursts of seconds 0 to 4: the scrape at 15 looks back to 5 and sees nothing, and so do all others.
    assert found["tokens/s by the gauge's scrapes, error at the worst moment"] == pytest.approx(1.0)
    assert row.verdict.verdict == PARTLY


def test_a_tile_of_256_fills_more_registers_than_an_h100_has() -> None:
    registers = {"A100": 128 * (128 + 128) * 4 / 2**18, "H100": 256 * (256 + 128) * 4 / 2**18}
    assert registers == {"A100": 0.5, "H100": 1.5}
    found, row = run("B-flash-advice", "tile_size_depends_on_the_gpu_128_x_128_on_a100")
    assert {gpu: found[f"{gpu}: registers for scores and output / all there are"] for gpu in registers} == registers
    assert row.verdict.verdict == PARTLY


def test_the_causal_mask_hides_nothing_from_a_decode_step() -> None:
    found, row = run("B-flash-advice", "the_causal_mask_needs_an_implementation_of_its")
    assert found["keys hidden from the query of a decode step"] == 0
    assert found["tile pairs without skipping / with"] == pytest.approx(16 * 16 / (16 * 17 / 2))
    assert row.verdict.verdict == PARTLY


def test_half_precision_is_read_from_the_committed_result() -> None:
    found, row = run("A-quantization", "fp16")
    assert 0 < found["loss, from nats a token to perplexity"] < 1
    assert found["decoding, float32 / this"] == pytest.approx(1.47, abs=0.01)
    assert all("bench quantization" in each.setting for each in row.findings if each.how.startswith("read"))
    assert row.verdict.verdict == CONFIRMED


def test_registers_are_read_from_the_compilers_report() -> None:
    found, row = run("A-layernorm-kernel", "registers_reduction")
    assert found["registers saved, 16 bytes a load"] == pytest.approx(1 - 32 / 36)
    assert found["registers saved, 2 bytes a load"] == pytest.approx(1 - 26 / 36)
    assert row.verdict.verdict == PARTLY


def test_a_leak_shows_and_eviction_does_not_cure_it() -> None:
    found, row = run("B-troubleshooting", "oom_after_long_running")
    assert found["blocks held after 300 requests"] == 0
    assert found["blocks held after 20 leaking requests"] == 20 * 3  # 40 tokens are three blocks of 16
    assert found["leaking requests served, LRU eviction / none"] == 1
    assert row.verdict.verdict == PARTLY


def test_a_paged_cache_holds_more_than_a_reserved_one() -> None:
    found, row = run("B-paged-memory", "memory_utilisation_gain")
    assert found["paged / reserved at 2,048"] > found["paged / oracle"] > 1
    assert row.verdict.verdict == CONFIRMED


def test_documents_gain_from_a_limit_only_where_memory_is_reserved() -> None:
    found, row = run("A-tuning-advice", "for_documents_beyond_8k_tokens_max_model_len")
    assert found["documents in flight, reserved at 32,768"] == 262_144 // 32_768
    assert found["documents in flight, paged, 1.2 x / 32,768"] == pytest.approx(1.0, abs=0.01)
    assert row.verdict.verdict == PARTLY


def test_fragmentation_is_what_lengths_leave_of_their_blocks() -> None:
    _, row = run("metrics-to-monitor", "memory_fragmentation_rate")
    assert row.verdict.verdict == CONFIRMED


def test_beyond_1024_tokens_both_parts_are_asked_at_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 150 ms plain attention ends near 1,024 tokens, where tiled attention does hardly better; at 1 s, neither."""
    monkeypatch.setattr(bottleneck, "_race_prompt", lambda lab: Timing.of([1.4] * 5))
    found, row = run("B-bottleneck", "beyond_1024_tokens_the_standard_implementation")
    for limit in (0.15, 1.0):
        longest = {name: bottleneck._longest_prompt(name, limit) for name in ("plain", "tiled")}
        assert found[f"longest prompt within {limit:g} s, tiled / plain"] == longest["tiled"] / longest["plain"]
        assert bottleneck._prefill_7b("plain", longest["plain"]) <= limit
        assert bottleneck._prefill_7b("plain", longest["plain"] + 128) > limit
    assert [each.outcome for each in row.verdict.judgements] == ["holds", "fails", "direction only", "holds", "holds"]
    assert row.verdict.verdict == PARTLY


def test_the_share_of_the_peak_is_held_against_the_claims_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottleneck, "_race_product", lambda lab: Timing.of([0.2] * 5))
    found, row = run("B-bottleneck", "peak_flops_utilisation")
    checks = [check for check in row.experiment.checks if isinstance(check, Check)]
    assert {check.high for check in checks} == {0.3}
    n, d, bandwidth, peak = 2048, 128, 1555e9, 312e12
    moved = 2 * (4 * n * d + 4 * n * n)  # bytes of q, k, v, out, and of S and P written and read, of one head
    assert found["A100 40GB, head_dim 128"] == pytest.approx(0.8 * 4 * n * n * d / (moved / bandwidth) / peak, rel=1e-3)
    assert [each.outcome for each in row.verdict.judgements] == ["holds", "holds", "holds", "fails"]


def test_plain_attention_and_a_product_are_raced_for_the_share_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottleneck.a100, "LENGTH", 256)
    share = bottleneck._race_product(Lab(quick=True))
    assert len(share.samples) == 5
    assert 0 < share.median < 1


def test_a_prompts_layer_is_raced_in_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(bottleneck._race_prompt(Lab(quick=True)).samples) == 5


def test_swap_space_is_a_share_of_the_gpus_memory_not_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_advice, "_CROWDS", (8,))
    found = list(memory_advice.swap_space(Lab(quick=True)))
    assert [finding.value for finding in found] == [0]  # eight requests leave no one out
    report = SimpleNamespace(
        run=SimpleNamespace(peak_host_blocks=100),
        deployment=SimpleNamespace(memory=SimpleNamespace(block_bytes=8 * 2**20), num_blocks=2000),
    )
    monkeypatch.setattr("vllm_teach.performance.simulator.serving.simulate_serving", lambda *_, **__: report)
    (finding,) = memory_advice.swap_space(Lab(quick=True))
    assert finding.value == pytest.approx(100 * 8 * 2**20 / (40 * 2**30), rel=0.08)


def test_what_fails_without_rdma_is_asked_of_a_prompt_and_of_a_token() -> None:
    found, row = run("A-deployment", "hardware_a100_80gb_512_gb_ddr4_3200_host_memory")
    prompt, token = (f"{what}, 10 Gb/s Ethernet / 100 Gb/s RDMA" for what in ("a prompt", "a token of one sequence"))
    assert found[token] > 1
    assert 2 < found[prompt] < 10  # ten times the bandwidth is the most
    assert row.verdict.verdict == PARTLY


def test_a_limit_is_judged_by_who_was_answered_in_time() -> None:
    """Of the answered the slowest has had at most the limit, whatever it does: that would be no finding."""
    experiment = load_experiments().get("A-tuning-advice", "2_4_workers_per_gpu_instance_nginx_least_conn_a")
    looked_at = [check.finding for check in experiment.checks if isinstance(check, Check)]
    assert "answered within 5 s, whole-request limit of 5 s / none" in looked_at
    assert not any("p99 of answers" in name for name in looked_at)
    found = {finding.name: finding for finding in scheduling_advice._timeout()}
    assert found[looked_at[2]].value > 0


def test_no_part_of_the_throughput_row_is_true_by_definition() -> None:
    experiment = load_experiments().get("A-tuning-advice", "a_drop_in_throughput_comes_from_gpu_utilisation")
    assert all("lost at 90 %" not in check.finding for check in experiment.checks if isinstance(check, Check))
    assert len(experiment.checks) == 3


def test_a_late_request_joins_a_running_batch_and_not_a_static_one() -> None:
    assert [selection._late_joins(batching) for batching in ("continuous", "static")] == [1, 0]


def test_the_flag_of_cudnn_governs_nothing_in_a_pass_of_the_model() -> None:
    operators = troubleshooting._operators_of_a_pass()
    assert any("mm" in name or "linear" in name for name in operators)
    found, row = run("B-troubleshooting", "same_input_varying_time")
    assert found["convolutions in a pass of the model"] == 0
    assert "spread with the flag / without" not in found  # a processor has no cuDNN to be timed
    assert row.verdict.verdict == CONTRADICTED


def test_a_tie_neither_raises_utilisation_nor_lowers_parallelism() -> None:
    experiment = load_experiments().get("A-tuning-advice", "a_larger_block_size_raises_memory_utilisation")
    checks = [check for check in experiment.checks if isinstance(check, Check)]
    tie = [counted(check.finding, 1.0, "x", "made up") for check in checks]
    assert judge(experiment.checks, tie).verdict == CONTRADICTED


def test_half_precision_of_the_softmax_is_compared_with_that_of_its_inputs() -> None:
    found, row = run("B-flash-advice", "fp16_is_fastest_some_cases_need_fp32_for")
    assert 1 < found["error, running softmax in float16 / float16 inputs alone"] < 1000  # not the ratio of two epsilons
    assert row.verdict.verdict == PARTLY
