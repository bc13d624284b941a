"""`vllm-teach bench throughput` and `bench latency`: the engine at work, with the flags of vLLM's own benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_teach.cli.arguments import add_dtype, add_lengths, add_measurement, add_model, count
from vllm_teach.cli.measurement import Result, measured
from vllm_teach.errors import InvalidArgumentError


def add_throughput(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench throughput`, and `run`."""
    parser.description = (
        "Serve the same requests with this engine and with other systems, in the same rounds, on the CPU. A system "
        "that cannot run here is named with the reason."
    )
    parser.add_argument(
        "--compare",
        type=_names,
        default=("transformers",),
        metavar="NAMES",
        help="of transformers, vllm, llama.cpp, with commas between; or none (default: transformers)",
    )
    parser.add_argument(
        "--peer-python",
        type=_interpreter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter that has vllm or llama.cpp installed (default: this one)",
    )
    add_model(parser)
    add_dtype(parser, "bfloat16")
    add_lengths(parser, "drawn, 16 to 512", "drawn, 16 to 256")
    parser.add_argument("--num-prompts", type=count, help="requests (default: 64)")
    parser.add_argument("--quick", action="store_true", help="16 short requests by default, for a first look")
    add_measurement(parser, 3, "each system serves all")
    parser.set_defaults(run=measured(_bench_throughput))


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))


def _interpreter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not valid: give NAME=PATH, as vllm=/opt/vllm/bin/python")
    return name, path


def _bench_throughput(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.throughput_bench import bench_throughput
    from vllm_teach.performance.throughput_report import FULL, QUICK, format_throughput

    pythons = dict(arguments.peer_python)
    if len(pythons) < len(arguments.peer_python):
        names = ", ".join(name for name, _ in arguments.peer_python)
        raise InvalidArgumentError(f"--peer-python names {names}: give one interpreter for each.")
    mix = QUICK if arguments.quick else FULL
    given = {
        "count": arguments.num_prompts,
        "inputs": arguments.input_len and (arguments.input_len, arguments.input_len),
        "outputs": arguments.output_len and (arguments.output_len, arguments.output_len),
    }
    bench = bench_throughput(
        arguments.model,
        compare=arguments.compare,
        peer_pythons=pythons,
        rounds=arguments.rounds,
        dtype=arguments.dtype,
        mix=replace(mix, **{name: value for name, value in given.items() if value is not None}),
        progress=not arguments.quiet,
    )
    return bench, format_throughput


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench latency`, and `run`."""
    parser.description = "Serve one batch of equally long requests, several times, with nothing else to do."
    add_model(parser)
    add_dtype(parser, "bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=count, default=8, help="requests (default: 8)")
    add_lengths(parser, 32, 128)
    parser.add_argument("--num-iters-warmup", type=count, default=1, help="rounds before the clock starts (default: 1)")
    add_measurement(parser, 5, "the batch is served", "--num-iters")
    parser.set_defaults(run=measured(_bench_latency))


def _bench_latency(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.latency_bench import Batch, bench_latency, format_latency

    bench = bench_latency(
        arguments.model,
        batch=Batch(arguments.batch_size, arguments.input_len or 32, arguments.output_len or 128),
        rounds=arguments.rounds,
        warmup=arguments.num_iters_warmup,
        dtype=arguments.dtype,
        device=arguments.device,
        progress=not arguments.quiet,
    )
    return bench, format_latency
