"""The command line, `vllm-teach COMMAND`: each command imports only what it needs."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_teach import __version__
from vllm_teach.errors import InvalidArgumentError, VllmTeachError


class _OutputError(Exception):
    """Standard output cannot be written: its reader is gone (`| head`) or its disk is full. Carries the OSError."""


def _write(text: object, end: str = "\n") -> None:
    """Print at once, so that an output that cannot be written shows here and not when Python ends."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        raise _OutputError(str(error)) from error


def run_info(arguments: argparse.Namespace) -> None:
    """Print versions, device, threads and the attention backends."""
    from vllm_teach.models.resolve import describe_models
    from vllm_teach.performance.environment import describe_environment, format_environment

    _write(format_environment(describe_environment()))
    _write("\nmodels")
    for name, state in describe_models().items():
        _write(f"  {name:<18}{state}")


def run_fetch(arguments: argparse.Namespace) -> None:
    """Fetch the real model once; afterwards everything runs offline."""
    from vllm_teach.models.fetch import fetch_smollm2

    _write(fetch_smollm2(progress=not arguments.quiet))


def run_lab(arguments: argparse.Namespace) -> None:
    """Open JupyterLab on the first lesson."""
    from vllm_teach.teaching.lab import open_lab

    open_lab(arguments.dir, browser=not arguments.no_browser, port=arguments.port, extra=arguments.jupyter_arguments)


def run_generate(arguments: argparse.Namespace) -> None:
    """Stream the model's continuation of a prompt, or its answer with --chat."""
    from vllm_teach import LLM, SamplingParams

    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        stop=arguments.stop,
    )
    llm = LLM(arguments.model, dtype=arguments.dtype, device=arguments.device)
    message = {"role": "user", "content": arguments.prompt}
    pieces = llm.stream(llm.chat_prompt([message]) if arguments.chat else arguments.prompt, params)
    if not arguments.chat:  # only now: `stream` has checked it
        _write(arguments.prompt, end="")
    for piece in pieces:
        _write(piece, end="")
    _write("")


def run_quantize(arguments: argparse.Namespace) -> None:
    """Quantise a model into a new folder, or go on where such a run broke off."""
    from vllm_teach.models import load_tokenizer, resolve_model
    from vllm_teach.models.partial_folder import check_output
    from vllm_teach.models.quantize import CALIBRATED, check_quantizable, quantize_model
    from vllm_teach.quantization.quantization_config import QuantizationConfig
    from vllm_teach.training.calibration_text import BUILTIN, calibration_ids

    config = QuantizationConfig.choose(
        arguments.method,
        bits=arguments.bits,
        group_size=arguments.group_size,
        symmetric=arguments.symmetric,
        act_order=arguments.act_order,
        head_bits=arguments.head_bits,
    )
    check_output(arguments.output)
    folder = resolve_model(arguments.model)
    check_quantizable(folder, config)
    text, ids = arguments.calibration or (BUILTIN if config.method in CALIBRATED else None), None
    if text is not None:
        sizes = {"samples": arguments.samples, "length": arguments.length, "seed": arguments.seed}
        ids = calibration_ids(text, load_tokenizer(folder), **sizes)
    _write(quantize_model(folder, arguments.output, config, ids, progress=not arguments.quiet))


def run_tune(arguments: argparse.Namespace) -> None:
    """Measure which attention backend is fastest here at which size; the policy "measured" reads the result."""
    from vllm_teach.performance.tuning import tune

    _write(tune(progress=not arguments.quiet))
    _write("\n`vllm_teach.backends.attend` and `explain` use this table when they are called with policy='measured'.")


def run_bench_attention(arguments: argparse.Namespace) -> None:
    """Measure the attention backends against each other and print the table."""
    from vllm_teach.performance.attention_bench import bench_attention, format_bench

    if arguments.json:
        _check_output_file(arguments.json)
    bench = bench_attention(
        rounds=arguments.rounds,
        device=arguments.device,
        scale=8 if arguments.quick else 1,
        progress=not arguments.quiet,
    )
    _write(format_bench(bench))
    if arguments.json:
        _write_json(arguments.json, bench.to_json())


def run_bench_throughput(arguments: argparse.Namespace) -> None:
    """Measure the engine's throughput beside another system's and print the table."""
    from vllm_teach.performance.throughput_bench import FULL, QUICK, bench_throughput, format_throughput

    if arguments.json:
        _check_output_file(arguments.json)
    bench = bench_throughput(
        arguments.model,
        compare=None if arguments.compare == "none" else arguments.compare,
        rounds=arguments.rounds,
        dtype=arguments.dtype,
        mix=QUICK if arguments.quick else FULL,
        progress=not arguments.quiet,
    )
    _write(format_throughput(bench))
    if arguments.json:
        _write_json(arguments.json, bench.to_json())


def run_bench_memory(arguments: argparse.Namespace) -> None:
    """Count what a KV cache holds, paged and reserved, and print the table."""
    from vllm_teach.performance.memory_bench import bench_memory, format_memory

    if arguments.json:
        _check_output_file(arguments.json)
    bench = bench_memory(arguments.mix, arguments.requests, arguments.slots, arguments.block_size, arguments.seed)
    _write(format_memory(bench))
    if arguments.json:
        _write_json(arguments.json, bench.to_json())


def _write_json(path: Path, result: dict[str, object]) -> None:
    with _output_file_errors(path):
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _check_output_file(path: Path) -> None:
    """Raise, before minutes are spent, when no file can be written there."""
    with _output_file_errors(path):
        if path.is_dir() or not path.parent.is_dir():
            raise FileNotFoundError("it is a folder, or its folder is not there")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("it is read-only")


@contextmanager
def _output_file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"--json is {str(path)!r}, which cannot be written ({error}): give a file."
        ) from error


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not valid: give a whole number from 1")


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: give a whole number from 1 to 65535")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each subparser carries its function as `run`."""
    parser = argparse.ArgumentParser(prog="vllm-teach", description="A vLLM-style inference system to learn from.")
    parser.add_argument("--version", action="version", version=f"vllm-teach {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="versions, device, threads, attention backends and why not the others")
    info.set_defaults(run=run_info)

    fetch = commands.add_parser("fetch", help="get SmolLM2-135M-Instruct (93 MB) and convert it, once")
    fetch.add_argument("--quiet", action="store_true", help="no progress bars")
    fetch.set_defaults(run=run_fetch)

    lab = commands.add_parser("lab", help="open JupyterLab on the lessons; what follows -- goes to JupyterLab")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
    lab.add_argument("--port", type=_port, help="serve on exactly this port")
    lab.add_argument("--dir", type=Path, help="copy the lessons to this folder and open them there")
    lab.add_argument("jupyter_arguments", nargs="*", metavar="-- ARGUMENT", help="arguments for JupyterLab")
    lab.set_defaults(run=run_lab)

    generate = commands.add_parser("generate", help="stream text from a prompt")
    generate.add_argument("prompt")
    generate.add_argument("--model", default="smollm2", help="alias, folder, .gguf file or hub id (default: smollm2)")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=-1)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", help="end before this text; may be given more than once")
    generate.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    generate.add_argument("--device", default="auto")
    generate.set_defaults(run=run_generate)

    quantize = commands.add_parser(
        "quantize",
        help="write a quantised copy of a model",
        description="Write a quantised copy of a model. A run that broke off goes on when the command is given again.",
    )
    quantize.add_argument("model", help="alias, folder, .gguf file or hub id")
    quantize.add_argument("--method", required=True, choices=["gptq", "awq", "rtn", "int8"])
    quantize.add_argument("--output", required=True, type=Path, metavar="DIR", help="the new folder")
    quantize.add_argument("--bits", type=int, choices=[2, 3, 4, 8], help="of a weight (default: 4; int8: 8)")
    quantize.add_argument(
        "--group-size", type=int, help="inputs that share a scale, -1 for all (default: 64; int8: -1)"
    )
    quantize.add_argument("--head-bits", type=int, default=16, choices=[8, 16], help="8 makes embedding and head int8")
    quantize.add_argument("--symmetric", action="store_true", help="the same reach to both sides of 0")
    quantize.add_argument("--act-order", action="store_true", help="gptq: the most important inputs first")
    quantize.add_argument("--calibration", metavar="FILE", help="text to learn from, or 'builtin' (gptq, awq: builtin)")
    quantize.add_argument("--samples", type=_count, default=128, help="pieces of that text (default: 128)")
    quantize.add_argument("--length", type=_count, default=512, help="tokens of a piece (default: 512)")
    quantize.add_argument("--seed", type=int, default=0, help="of the choice of text (default: 0)")
    quantize.add_argument("--quiet", action="store_true", help="no progress bar")
    quantize.set_defaults(run=run_quantize)

    tune = commands.add_parser("tune", help="measure once which attention backend is fastest here at which size")
    tune.add_argument("--quiet", action="store_true", help="no progress bar")
    tune.set_defaults(run=run_tune)

    bench = commands.add_parser("bench", help="measure: attention, memory, throughput").add_subparsers(
        required=True, metavar="WHAT"
    )
    attention = bench.add_parser("attention", help="time and memory of the attention backends, as ratios of one run")
    attention.add_argument("--rounds", type=_count, default=7, help="each backend runs once a round (default: 7)")
    attention.add_argument("--device", default="cpu")
    attention.add_argument("--quick", action="store_true", help="an eighth of the lengths, for a first look")
    attention.add_argument("--json", type=Path, metavar="FILE", help="write the figures and where they come from, too")
    attention.add_argument("--quiet", action="store_true", help="no progress bar")
    attention.set_defaults(run=run_bench_attention)
    memory = bench.add_parser("memory", help="sequences that a KV cache holds, paged and reserved, over a length mix")
    memory.add_argument("--mix", default="sharegpt", choices=["sharegpt", "alpaca"], help="lengths (default: sharegpt)")
    memory.add_argument("--requests", type=_count, default=1000)
    memory.add_argument("--slots", type=_count, default=65_536, help="tokens that fit (default: 65536)")
    memory.add_argument("--block-size", type=_count, default=16, help="tokens of a block (default: 16)")
    memory.add_argument("--seed", type=int, default=0)
    memory.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    memory.set_defaults(run=run_bench_memory)
    throughput = bench.add_parser("throughput", help="tokens a second of the engine beside another system, one run")
    throughput.add_argument("--compare", default="transformers", choices=["transformers", "none"])
    throughput.add_argument("--model", default="smollm2", help="alias, folder, .gguf file or hub id (default: smollm2)")
    throughput.add_argument("--dtype", default="bfloat16", choices=["auto", "float32", "bfloat16", "float16"])
    throughput.add_argument("--rounds", type=_count, default=3, help="each system serves all once a round (default: 3)")
    throughput.add_argument("--quick", action="store_true", help="16 short requests, for a first look")
    throughput.add_argument("--json", type=Path, metavar="FILE", help="write the figures and where they come from, too")
    throughput.add_argument("--quiet", action="store_true", help="no progress bar")
    throughput.set_defaults(run=run_bench_throughput)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a typed error becomes one line on stderr and status 1.

    An output whose reader has gone away ends the command in silence with 141, as the shell shows for SIGPIPE.
    """
    # Read when torch is first imported, below. A spinning OpenMP thread takes a core that a busy machine needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _escape_what_the_terminal_lacks()
    try:
        try:
            arguments = build_parser().parse_args(argv)
            arguments.run(arguments)
        finally:
            _write("", end="")  # argparse leaves --help in the buffer
    except VllmTeachError as error:
        print(f"vllm-teach: {error}", file=sys.stderr)
        return 1
    except _OutputError as error:
        _discard_output()
        if isinstance(error.__cause__, BrokenPipeError):
            return 141
        print(f"vllm-teach: the output cannot be written ({error}): send it elsewhere.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvllm-teach: interrupted", file=sys.stderr)
        return 130
    return 0


def _escape_what_the_terminal_lacks() -> None:
    """Print a character that the terminal's encoding lacks as its number, where Python would raise an error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # no method of a stream that someone put in its place
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send to nowhere what is still in the buffer: Python writes it once more when it ends, and fails again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
