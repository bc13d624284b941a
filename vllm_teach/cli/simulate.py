"""`vllm-teach simulate`: a model served on hardware that is not there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_teach.cli.arguments import add_json, count
from vllm_teach.cli.output import check_output_file, output_file_errors, write, write_json
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from vllm_teach.performance.simulator.capacity import Objective, Trial
    from vllm_teach.performance.simulator.deployment import Deployment
    from vllm_teach.performance.simulator.serving import ServingReport
    from vllm_teach.performance.simulator.traffic import Traffic

# The flags that are arguments of `deploy`, with its defaults: those not given are not handed on.
_DEPLOYMENT_FLAGS: dict[str, dict[str, Any]] = {
    "tensor-parallel-size": {"type": count, "help": "devices (default: 1)"},
    "dtype": {"choices": ["bfloat16", "float16", "float32"], "help": "(default: bfloat16)"},
    "quantization": {"choices": ["awq", "gptq", "rtn", "int8"], "help": "of the weights (default: none)"},
    "attention": {"choices": ["naive", "tiled", "paged"], "help": "algorithm (default: paged)"},
    "link": {"help": "between the devices, as ethernet-10g (default: the hardware's own)"},
    "block-size": {"type": count, "help": "tokens of a block (default: 16)"},
    "gpu-memory-utilization": {"type": float, "help": "share of a device's memory (default: 0.9)"},
    "num-kv-blocks": {"type": count, "help": "blocks of the cache (default: what fits)"},
    "swap-space": {"type": float, "help": "GiB of host memory for swapped sequences (default: 0)"},
    "preemption-mode": {"choices": ["recompute", "swap", "auto"]},
    "max-model-len": {"type": count, "help": "tokens of a prompt and its answer (default: the model's context)"},
    "max-num-seqs": {"type": count, "help": "sequences in a step (default: 256)"},
    "max-num-batched-tokens": {"type": count, "help": "tokens in a step (default: 2048)"},
    "long-prefill-token-threshold": {"type": int, "help": "tokens of one long prompt in a step (default: 0, no limit)"},
    "enable-chunked-prefill": {"action": argparse.BooleanOptionalAction, "help": "(default: yes)"},
    "enable-prefix-caching": {"action": argparse.BooleanOptionalAction, "help": "(default: yes)"},
    "batching": {"choices": ["continuous", "static", "prefill_first"]},
    "scheduling-policy": {"choices": ["fcfs", "priority"]},
}
_PICTURES = (".png", ".svg", ".pdf")
_LATENCIES = {
    "ttft": "time to first token",
    "itl": "time between two tokens",
    "tpot": "time per output token",
    "e2e": "whole time",
}


def add_simulate(commands: Any) -> None:
    """Add `simulate` to the subparsers of `vllm-teach`."""
    simulate = commands.add_parser(
        "simulate",
        help="serve any model on any hardware, modelled: throughput, latencies, capacity",
        description="Serve a model with the real scheduler and cache on hardware that is not there. All is modelled.",
    )
    system = simulate.add_argument_group("the system")
    system.add_argument("--model", required=True, help="a published shape, as llama-2-70b; alias or folder")
    system.add_argument(
        "--hardware", required=True, help='as a100-80gb-sxm, or "this": as measured by vllm-teach tune --steps'
    )
    for name, settings in _DEPLOYMENT_FLAGS.items():
        system.add_argument(f"--{name}", default=None, **settings)
    _add_requests(simulate.add_argument_group("the requests"))
    _add_results(simulate.add_argument_group("the result"))
    simulate.set_defaults(run=run_simulate)


def _add_requests(group: Any) -> None:
    group.add_argument("--num-prompts", type=count, help="requests (default: 1000; of a trace: all)")
    group.add_argument("--input-len", type=count, help="tokens of each prompt (default: 1024)")
    group.add_argument("--output-len", type=count, help="tokens of each answer (default: 128)")
    group.add_argument("--mix", choices=["sharegpt", "alpaca"], help="draw lengths as users bring them")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens"
    )
    group.add_argument("--request-rate", type=float, help="requests a second (default: inf, all at once)")
    group.add_argument("--burstiness", type=float, help="shape of the gaps: 1 Poisson, less in bursts (default: 1)")
    group.add_argument("--shared-prefix", type=count, metavar="TOKENS", help="that prompts begin with in common")
    group.add_argument("--num-prefixes", type=count, help="texts of which each prompt begins with one (default: 1)")
    group.add_argument("--seed", type=int, default=0, help="of lengths, times and prefixes (default: 0)")


def _add_results(group: Any) -> None:
    group.add_argument("--find", choices=["max-qps"], help="the highest rate that keeps the limits below")
    for name, what in _LATENCIES.items():
        group.add_argument(f"--{name}-p99-ms", type=float, metavar="MS", help=f"limit of the {what}, for --find")
    group.add_argument("--resolution", type=float, help="of the rate found (default: 0.02)")
    add_json(group)
    group.add_argument("--quiet", action="store_true", help="no progress bar of --find")
    group.add_argument("--trace-out", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev")
    group.add_argument("--figure", type=Path, metavar="FILE", help="draw the run over time (.png, .svg, .pdf)")


def run_simulate(arguments: argparse.Namespace) -> None:
    """Simulate, print the table, and write the files that are asked for."""
    from vllm_teach.performance.simulator.deployment import deploy

    for option in ("json", "trace_out", "figure"):
        if getattr(arguments, option) is not None:
            check_output_file(getattr(arguments, option), _flag(option))
    files = [file.resolve() for name in ("json", "trace_out", "figure") if (file := getattr(arguments, name))]
    if len(set(files)) < len(files):
        raise InvalidArgumentError("--json, --trace-out and --figure name the same file: give each one of its own.")
    objectives = _objectives(arguments)
    if arguments.figure is not None and arguments.figure.suffix.lower() not in _PICTURES:
        raise InvalidArgumentError(f"--figure is {str(arguments.figure)!r}: name a file {' or '.join(_PICTURES)}.")
    names = [name.replace("-", "_") for name in _DEPLOYMENT_FLAGS]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    deployment = deploy(arguments.model, arguments.hardware, **given)
    workload = _workload(arguments)
    if objectives:
        _find(arguments, deployment, workload, objectives)
    else:
        _serve(arguments, deployment, workload)


def _serve(arguments: argparse.Namespace, deployment: Deployment, workload: Traffic) -> None:
    from vllm_teach.performance.simulator.serving import serve
    from vllm_teach.performance.simulator.serving_table import format_serving

    report = serve(deployment, workload, max_events=None if arguments.trace_out else 1)
    write(format_serving(report))
    if arguments.json:
        write_json(arguments.json, {**report.to_json(), "command": arguments.command_line})
    if arguments.trace_out:
        with output_file_errors(arguments.trace_out, "--trace-out"):
            arguments.trace_out.write_text(json.dumps(report.chrome_trace()), encoding="utf-8")
    if arguments.figure:
        _draw(arguments.figure, report)


def _find(
    arguments: argparse.Namespace, deployment: Deployment, workload: Traffic, objectives: list[Objective]
) -> None:
    from tqdm import tqdm

    from vllm_teach.performance.simulator.capacity import find_max_rate
    from vllm_teach.performance.simulator.serving_table import format_capacity

    options = {name: getattr(arguments, name) for name in ("burstiness", "resolution")}
    given = {name: value for name, value in options.items() if value is not None}
    # On a terminal alone: what an error says stands in a line of its own.
    with tqdm(desc="simulate", unit=" rates", disable=arguments.quiet or None) as bar:

        def announce(trial: Trial) -> None:
            bar.set_postfix_str(f"{trial.rate:.4g} a second: {'kept' if trial.kept else 'missed'}")
            bar.update()

        capacity = find_max_rate(deployment, workload, *objectives, seed=arguments.seed, on_trial=announce, **given)
    write(format_capacity(capacity, deployment))
    if arguments.json:
        plain = {"deployment": deployment.to_json(), "workload": workload.lengths, "command": arguments.command_line}
        write_json(arguments.json, {**capacity.to_json(), **plain})


def _objectives(arguments: argparse.Namespace) -> list[Objective]:
    from vllm_teach.performance.simulator.capacity import Objective

    limits = {name: getattr(arguments, f"{name}_p99_ms") for name in _LATENCIES}
    objectives = [Objective(name, value / 1e3) for name, value in limits.items() if value is not None]
    if arguments.find is None:
        given = [f"{name}_p99_ms" for name, value in limits.items() if value is not None]
        _refuse(arguments, [*given, "resolution"], "belongs to --find max-qps: give that, too")
    else:
        if not objectives:
            flags = ", ".join(f"--{name}-p99-ms" for name in _LATENCIES)
            raise InvalidArgumentError(f"--find {arguments.find} has no limit to keep to: give one of {flags}.")
        _refuse(arguments, ["request_rate"], "is what --find looks for: leave it out")
        _refuse(arguments, ["trace_out", "figure"], "shows one run, and --find makes many: leave it out")
    return objectives


def _workload(arguments: argparse.Namespace) -> Traffic:
    from vllm_teach.performance.simulator.request_trace import read_request_trace
    from vllm_teach.performance.simulator.traffic import AT_ONCE

    if arguments.trace is None:
        workload = _drawn(arguments)
    else:
        _refuse(arguments, ["input_len", "output_len", "mix"], "is what the trace says: leave it out")
        workload = read_request_trace(arguments.trace, arguments.num_prompts)
        if arguments.num_prompts is not None and len(workload.arrivals) < arguments.num_prompts:
            raise InvalidArgumentError(
                f"--num-prompts is {arguments.num_prompts}, but {arguments.trace} has {len(workload.arrivals)} "
                "requests: ask for at most these, or leave it out."
            )
    if arguments.burstiness is not None and arguments.request_rate is None and arguments.find is None:
        _refuse(arguments, ["burstiness"], "belongs to a rate: give --request-rate, too")
    if arguments.request_rate is not None or arguments.trace is None:
        rate = AT_ONCE if arguments.request_rate is None else arguments.request_rate
        burstiness = 1.0 if arguments.burstiness is None else arguments.burstiness
        workload = workload.at_rate(rate, burstiness, arguments.seed)
    if arguments.shared_prefix is None:
        _refuse(arguments, ["num_prefixes"], "belongs to a shared prefix: give --shared-prefix, too")
        return workload
    longest = max(each.prompt_len for each in workload.arrivals)
    if arguments.shared_prefix >= longest:
        raise InvalidArgumentError(
            f"--shared-prefix is {arguments.shared_prefix}, but no prompt has more than {longest} tokens, one of them "
            "its own: give fewer."
        )
    return workload.with_shared_prefix(arguments.shared_prefix, arguments.num_prefixes or 1, arguments.seed)


def _drawn(arguments: argparse.Namespace) -> Traffic:
    from vllm_teach.kvcache.length_mix import MIXES
    from vllm_teach.performance.simulator.traffic import draw_traffic

    number = arguments.num_prompts or 1000
    if arguments.mix is None:
        return draw_traffic(number, (arguments.input_len or 1024, arguments.output_len or 128), seed=arguments.seed)
    _refuse(arguments, ["input_len", "output_len"], "is what the mix draws: leave it out")
    return draw_traffic(number, MIXES[arguments.mix], seed=arguments.seed)


def _draw(file: Path, report: ServingReport) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from vllm_teach.teaching import style
    from vllm_teach.teaching.figures.simulated_service import draw_service_over_time, service_over_time

    style.apply()
    deployment = report.deployment
    title = f"{deployment.model} on {deployment.tensor_parallel_size} x {deployment.hardware.title} (modelled)"
    figure = draw_service_over_time(service_over_time(report), title=title)
    with output_file_errors(file, "--figure"):
        figure.savefig(file)


def _refuse(arguments: argparse.Namespace, names: list[str], why: str) -> None:
    """Raise InvalidArgumentError for the first of these options that was given."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise InvalidArgumentError(f"{_flag(name)} {why}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
