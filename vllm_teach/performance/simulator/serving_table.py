"""A simulation's figures as text. Each table says that they are modelled."""

from __future__ import annotations

from vllm_teach.performance.load_test.log_histogram import PERCENTILES
from vllm_teach.performance.simulator.capacity import Capacity, Trial
from vllm_teach.performance.simulator.deployment import Deployment
from vllm_teach.performance.simulator.serving import ServingReport

_GB = 1e9


def format_serving(report: ServingReport) -> str:
    """Return the report as plain text; latencies in milliseconds."""
    parts = [format_deployment(report.deployment), _throughput(report), _latencies(report), _cache(report)]
    return "\n\n".join(parts)


def format_deployment(deployment: Deployment) -> str:
    """Return what is simulated, and how its memory is used."""
    memory, engine = deployment.memory, deployment.engine
    weights = f"{deployment.quantization} weights" if deployment.quantization else deployment.dtype
    devices = f"{deployment.tensor_parallel_size} x " if deployment.tensor_parallel_size > 1 else ""
    cache = deployment.num_blocks * memory.block_bytes
    return "\n".join(
        [
            f"MODELLED: {deployment.model}, {weights}, on {devices}{deployment.hardware.title}; nothing was measured",
            f"  a device's memory  {memory.total / _GB:.1f} GB: weights {memory.weights / _GB:.1f}, "
            f"KV cache {cache / _GB:.1f}, a step {memory.activations / _GB:.1f}, "
            f"not to be used {(memory.total - memory.usable) / _GB:.1f}",
            f"  KV cache           {deployment.num_blocks:,} blocks of {engine.block_size} tokens, "
            f"{deployment.num_blocks * engine.block_size:,} tokens",
            f"  a step             {engine.max_num_batched_tokens:,} tokens, {engine.max_num_seqs:,} sequences at most",
            f"  what it takes      {deployment.cost_source}",
        ]
    )


def _throughput(report: ServingReport) -> str:
    run, series = report.run, report.series
    lines = [
        str(report.workload),
        f"  {run.seconds:,.2f} s modelled, {run.num_steps:,} steps, "
        f"{series.mean('running'):.1f} sequences at once on average, at most {max(series.waiting):,} waiting",
        f"  requests a second  {report.request_throughput:,.3f}",
        f"  tokens a second    {report.output_throughput:,.1f} out, {report.total_throughput:,.1f} in and out",
    ]
    if series.busy_seconds < 0.999 * run.seconds:
        lines.append(f"  idle               {1 - series.busy_seconds / run.seconds:.1%} of the time")
    return "\n".join(lines)


def _latencies(report: ServingReport) -> str:
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines = [f"  {'ms, modelled':<14}{'of':>9}" + "".join(f"{name:>12}" for name in columns)]
    for name, figures in report.latencies.items():
        if figures is not None:
            cells = "".join(f"{figures[column] * 1e3:>12,.2f}" for column in columns)
            lines.append(f"  {name:<14}{figures['count']:>9,}{cells}")
    return "\n".join(lines)


def _cache(report: ServingReport) -> str:
    run, usage = report.run, report.run.kv.usage()
    lines = [
        f"  KV cache in use    {report.mean_kv_usage:.1%} on average, {report.peak_kv_usage:.1%} at the most",
        f"  preemptions        {run.num_preemptions:,}",
    ]
    if usage.swapped_out:
        lines.append(f"  swapped            {usage.swapped_out:,} blocks out, {usage.swapped_in:,} back")
    if usage.hit_tokens:
        lines.append(f"  prefix cache       {usage.hit_rate:.1%} of the prompts' tokens were there already")
    return "\n".join(lines)


def format_capacity(capacity: Capacity, deployment: Deployment) -> str:
    """Return the search as plain text: each rate that was tried, by rate, and the highest that was kept."""
    names = [f"{each.latency} p{100 * each.share:g}" for each in capacity.objectives]
    lines = [
        format_deployment(deployment),
        "",
        f"  {'requests/s':>12}" + "".join(f"{f'{name}, ms':>16}" for name in names) + "   modelled",
        *(_trial(each) for each in sorted(capacity.trials, key=lambda trial: trial.rate)),
        "",
        f"highest rate that keeps {' and '.join(map(str, capacity.objectives))}: {capacity.rate:.4g} requests a second "
        "(modelled)",
        f"  {capacity.refused:.4g} is too many; {capacity.num_requests:,} requests at each rate",
    ]
    if capacity.is_burst:
        lines.append(
            f"  BUT NOT FOR LONG: all at once, {capacity.served:.4g} a second are served. So few requests end before "
            "the queue has grown; simulate more of them (--num-prompts)"
        )
    return "\n".join(lines)


def _trial(trial: Trial) -> str:
    cells = "".join(f"{seconds * 1e3:>16,.2f}" for seconds in trial.latencies)
    return f"  {trial.rate:>12.4g}{cells}   {'kept' if trial.kept else 'missed'}"
