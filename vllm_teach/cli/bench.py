"""`vllm-teach bench WHAT`: each measures, prints its table, and with `--json` writes its figures and the command."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_teach.cli.arguments import add_json, add_measurement, add_model, count
from vllm_teach.cli.bench_engine import add_latency, add_throughput
from vllm_teach.cli.bench_serve import add_bench_serve
from vllm_teach.cli.measurement import Result, measured


def add_bench(commands: Any) -> None:
    """Add `bench` and all that it measures to the subparsers of `vllm-teach`."""
    what = "attention, kernels, latency, linear, memory, norms, quantization, serve, simulate, throughput"
    bench = commands.add_parser("bench", help=f"measure: {what}").add_subparsers(required=True, metavar="WHAT")
    _add_attention(bench.add_parser("attention", help="time and memory of the attention backends, as ratios"))
    _add_kernels(bench.add_parser("kernels", help="each kernel of this project beside PyTorch's operation"))
    add_latency(bench.add_parser("latency", help="what one batch waits for its first tokens, and for each after them"))
    _add_linear(bench.add_parser("linear", help="products with quantised weights, ours and PyTorch's, beside bfloat16"))
    _add_memory(bench.add_parser("memory", help="sequences that a KV cache holds, paged and reserved, over a mix"))
    _add_norms(bench.add_parser("norms", help="LayerNorm and RMSNorm in one kernel, and operation by operation"))
    _add_quantization(bench.add_parser("quantization", help="perplexity, bytes and speed of quantised weights"))
    add_bench_serve(bench.add_parser("serve", help="latencies and goodput of an OpenAI-compatible server under load"))
    _add_simulate(bench.add_parser("simulate", help="steps a second of the simulator, at three batch sizes"))
    add_throughput(bench.add_parser("throughput", help="tokens a second of the engine beside other systems"))


def _add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="an eighth of the lengths, for a first look")
    add_measurement(parser, 7, "each backend runs")
    parser.set_defaults(run=measured(_bench_attention))


def _bench_attention(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.attention_bench import bench_attention, format_bench

    scale = 8 if arguments.quick else 1
    bench = bench_attention(rounds=arguments.rounds, device=arguments.device, scale=scale, progress=not arguments.quiet)
    return bench, format_bench


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--length", type=count, help="tokens, a multiple of 64 (default: 1024; on a GPU: 4096)")
    add_measurement(parser, 7, "each case runs")
    parser.set_defaults(run=measured(_bench_kernels))


def _bench_kernels(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.kernel_bench import bench_kernels, format_kernels

    bench = bench_kernels(
        length=arguments.length,
        dtype=arguments.dtype,
        rounds=arguments.rounds,
        device=arguments.device,
        progress=not arguments.quiet,
    )
    return bench, format_kernels


def _add_linear(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=count, nargs="+", default=[1, 8, 64, 512], help="(default: 1 8 64 512)")
    add_measurement(parser, 5, "each product runs")
    parser.set_defaults(run=measured(_bench_linear))


def _bench_linear(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.linear_bench import bench_linear, format_linear

    tokens = tuple(arguments.tokens)
    return bench_linear(tokens=tokens, rounds=arguments.rounds, progress=not arguments.quiet), format_linear


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mix", default="sharegpt", choices=["sharegpt", "alpaca"], help="lengths (default: sharegpt)")
    parser.add_argument("--requests", "--num-prompts", type=count, default=1000)
    parser.add_argument("--slots", type=count, default=65_536, help="tokens that fit (default: 65536)")
    parser.add_argument("--block-size", type=count, default=16, help="tokens of a block (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)
    parser.set_defaults(run=measured(_bench_memory))


def _bench_memory(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.memory_bench import bench_memory, format_memory

    bench = bench_memory(arguments.mix, arguments.requests, arguments.slots, arguments.block_size, arguments.seed)
    return bench, format_memory


def _add_norms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=count, default=2048, help="rows (default: 2048)")
    parser.add_argument("--size", type=count, default=2048, help="elements of a row (default: 2048)")
    parser.add_argument("--device", default="cpu")
    add_measurement(parser, 15, "each way runs")
    parser.set_defaults(run=measured(_bench_norms))


def _bench_norms(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.norm_bench import bench_norms, format_norms

    bench = bench_norms(
        tokens=arguments.tokens,
        size=arguments.size,
        rounds=arguments.rounds,
        device=arguments.device,
        progress=not arguments.quiet,
    )
    return bench, format_norms


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep the quantised models there, and use them again"
    )
    parser.add_argument("--samples", type=count, help="pieces of text to calibrate on (default: 32)")
    parser.add_argument("--length", type=count, help="tokens of a piece (default: 512)")
    parser.add_argument("--tokens", type=count, help="tokens of other text to score (default: all there is)")
    parser.add_argument("--window", type=count, help="tokens of context (default: 1024, or the model's if fewer)")
    parser.add_argument(
        "--quick", action="store_true", help="a first look: 8 x 128 tokens to calibrate on, 1,000 to score, by default"
    )
    add_measurement(parser, 5, "each model decodes")
    parser.set_defaults(run=measured(_bench_quantization))


def _bench_quantization(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.models import load_tokenizer, resolve_model
    from vllm_teach.performance.quantization_bench import bench_quantization, format_quantization
    from vllm_teach.performance.quantization_plan import check_plan
    from vllm_teach.training.calibration_text import BUILTIN, calibration_ids
    from vllm_teach.training.evaluation_text import evaluation_ids

    samples = arguments.samples or (8 if arguments.quick else 32)
    length = arguments.length or (128 if arguments.quick else 512)
    tokens = arguments.tokens or (1000 if arguments.quick else None)
    source = resolve_model(arguments.model)
    check_plan(source, arguments.folder, tokens=tokens, window=arguments.window)
    tokenizer = load_tokenizer(source)
    calibration = calibration_ids(BUILTIN, tokenizer, samples=samples, length=length)
    with ExitStack() as cleanup:
        bench = bench_quantization(
            arguments.model,
            evaluation_ids(tokenizer, tokens),
            calibration,
            arguments.folder or Path(cleanup.enter_context(tempfile.TemporaryDirectory())),
            window=arguments.window,
            rounds=arguments.rounds,
            progress=not arguments.quiet,
        )
    return bench, format_quantization


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-2-70b", help="shape, alias or folder (default: llama-2-70b)")
    parser.add_argument("--hardware", default="a100-80gb-sxm", help="(default: a100-80gb-sxm)")
    parser.add_argument("--tensor-parallel-size", type=count, default=8, help="devices (default: 8)")
    parser.add_argument("--rounds", type=count, default=3, help="each batch size once a round (default: 3)")
    add_json(parser)
    parser.set_defaults(run=measured(_bench_simulate))


def _bench_simulate(arguments: argparse.Namespace) -> tuple[Result, Callable[[Any], str]]:
    from vllm_teach.performance.simulator.speed import bench_simulator, format_simulator_bench

    bench = bench_simulator(
        arguments.model, arguments.hardware, arguments.tensor_parallel_size, rounds=arguments.rounds
    )
    return bench, format_simulator_bench
