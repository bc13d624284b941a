"""The tables: the figures of the report, and that they are modelled."""

import re

from vllm_teach.performance.simulator.capacity import Objective, find_max_rate
from vllm_teach.performance.simulator.deployment import deploy
from vllm_teach.performance.simulator.serving import serve
from vllm_teach.performance.simulator.serving_table import format_capacity, format_serving
from vllm_teach.performance.simulator.traffic import draw_traffic
from vllm_teach.performance.virtual_time import StepCost


def test_the_reports_figures_stand_in_it() -> None:
    deployment = deploy("llama-2-70b", "a100-80gb-sxm", tensor_parallel_size=8, quantization="awq")
    report = serve(deployment, draw_traffic(20, (300, 40), 2.0).with_shared_prefix(160))
    text = format_serving(report)
    assert text.startswith("MODELLED: llama-2-70b, awq weights, on 8 x NVIDIA A100 80GB SXM; nothing was measured")
    assert f"{deployment.num_blocks:,} blocks of 16 tokens" in text
    assert f"what it takes      {deployment.cost_source}" in text
    assert f"requests a second  {report.request_throughput:,.3f}" in text
    assert f"{report.output_throughput:,.1f} out" in text
    words = [line.split() for line in text.splitlines() if re.match(r"  (ttft|itl|tpot|e2e) ", line)]
    rows = {name: figures for name, *figures in words}
    for name, figures in report.latencies.items():
        assert rows[name] == [f"{figures['count']:,}", *(f"{figures[c] * 1e3:,.2f}" for c in list(figures)[1:])]
    assert "of the prompts' tokens were there already" in text
    assert "idle" in text
    assert "swapped" not in text


def test_swaps_are_told() -> None:
    swapping = {"num_kv_blocks": 12, "swap_space": 0.01, "preemption_mode": "swap", "watermark": 0.0}
    report = serve(deploy("tiny", "l4", cost=StepCost(), **swapping), draw_traffic(3, (40, 60)))
    assert report.run.num_preemptions > 0
    text = format_serving(report)
    assert f"preemptions        {report.run.num_preemptions}" in text
    assert f"{report.run.kv.usage().swapped_out} blocks out" in text
    assert "idle" not in text


def test_a_search_shows_each_rate_and_the_answer() -> None:
    deployment = deploy("llama-2-7b", "a100-80gb-sxm")
    found = find_max_rate(deployment, draw_traffic(200, (512, 8)), Objective("ttft", 0.3), resolution=0.1)
    lines = format_capacity(found, deployment).splitlines()
    assert sum("kept" in line or "missed" in line for line in lines) == len(found.trials)
    assert lines[-2].endswith(f"ttft p99 within 300 ms: {found.rate:.4g} requests a second (modelled)")
    assert lines[0].startswith("MODELLED: llama-2-7b")
