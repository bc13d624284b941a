"""The command line, `vllm-teach COMMAND`: each command imports only what it needs."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_teach import __version__
from vllm_teach.cli.arguments import add_model, count, port
from vllm_teach.cli.bench import add_bench
from vllm_teach.cli.output import OutputError, discard_output, escape_what_the_terminal_lacks, write
from vllm_teach.cli.serve import add_serve
from vllm_teach.cli.simulate import add_simulate
from vllm_teach.cli.tune import add_tune
from vllm_teach.cli.validate import add_validate
from vllm_teach.errors import InvalidArgumentError, VllmTeachError
from vllm_teach.openmp import wait_shortly

_WITH_POSITIONAL = ("generate", "quantize")


def run_info(arguments: argparse.Namespace) -> None:
    """Print versions, device, threads and the attention backends."""
    from vllm_teach.models.resolve import describe_models
    from vllm_teach.performance.environment import describe_environment, format_environment

    write(format_environment(describe_environment()))
    write("\nmodels")
    for name, state in describe_models().items():
        write(f"  {name:<18}{state}")


def run_fetch(arguments: argparse.Namespace) -> None:
    """Fetch the real model once; afterwards everything runs offline."""
    from vllm_teach.models.fetch import fetch_smollm2

    write(fetch_smollm2(progress=not arguments.quiet))


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
    # The first piece before the prompt: `stream` has checked it then, and the kernels are built, which says so.
    first = next(pieces, "")
    write(first if arguments.chat else arguments.prompt + first, end="")
    for piece in pieces:
        write(piece, end="")
    write("")


def run_quantize(arguments: argparse.Namespace) -> None:
    """Quantise a model into a new folder, or go on where such a run broke off."""
    from vllm_teach.engine.heap import return_large_blocks
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
    text = BUILTIN if arguments.calibration is None and config.method in CALIBRATED else arguments.calibration
    choice = {name: value for name in ("samples", "length", "seed") if (value := getattr(arguments, name)) is not None}
    if text is None and choice:
        option = f"--{next(iter(choice))}"
        raise InvalidArgumentError(
            f"{option} chooses from a text, and {config.method!r} reads none without --calibration: give that, too, or "
            f"leave {option} out."
        )
    return_large_blocks()
    check_output(arguments.output)
    folder = resolve_model(arguments.model)
    check_quantizable(folder, config)
    ids = None if text is None else calibration_ids(text, load_tokenizer(folder), **choice)
    try:
        write(quantize_model(folder, arguments.output, config, ids, progress=not arguments.quiet))
    except KeyboardInterrupt:
        print("\nvllm-teach: the layers that are done are kept; the same command goes on from there.", file=sys.stderr)
        raise


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
    lab.add_argument("--port", type=port, help="serve on exactly this port")
    lab.add_argument("--dir", type=Path, help="copy the lessons to this folder and open them there")
    lab.add_argument("jupyter_arguments", nargs="*", metavar="-- ARGUMENT", help="arguments for JupyterLab")
    lab.set_defaults(run=run_lab)

    generate = commands.add_parser("generate", help="stream text from a prompt")
    generate.add_argument("prompt")
    add_model(generate)
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=64, help="to write at most (default: 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest, of this probability together"
    )
    generate.add_argument("--top-k", type=int, default=-1, help="sample from so many, -1 for all (the default)")
    generate.add_argument("--seed", type=int, help="the same seed gives the same text")
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
    quantize.add_argument(
        "--calibration",
        metavar="FILE",
        help="text to learn from, or 'builtin' (gptq, awq: builtin); rtn, int8: to measure errors on (default: none)",
    )
    quantize.add_argument("--samples", type=count, help="pieces of that text (default: 32)")
    quantize.add_argument("--length", type=count, help="tokens of a piece (default: 512)")
    quantize.add_argument("--seed", type=int, help="of the choice of text (default: 0)")
    quantize.add_argument("--quiet", action="store_true", help="no progress bar")
    quantize.set_defaults(run=run_quantize)

    add_tune(commands)
    add_serve(commands)
    add_bench(commands)
    add_simulate(commands)
    add_validate(commands)
    return parser


def parse_command_line(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a command line; one that is wrong ends the process with status 2 and says why."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # As others' servers have it: `serve MODEL`. What follows a command's own positional is no model.
        model = "model" in arguments and arguments.command not in _WITH_POSITIONAL and not unknown[0].startswith("-")
        hint = f"; to name a model, give --model {unknown[0]}" if model else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a typed error becomes one line on stderr and status 1.

    An output whose reader has gone away ends the command in silence with 141, as the shell shows for SIGPIPE.
    """
    os.environ.update(wait_shortly(os.environ))  # read when torch is first imported, below
    escape_what_the_terminal_lacks()
    try:
        try:
            arguments = parse_command_line(argv)
            arguments.command_line = shlex.join(["vllm-teach", *(sys.argv[1:] if argv is None else argv)])
            arguments.run(arguments)
        finally:
            write("", end="")  # argparse leaves --help in the buffer
    except VllmTeachError as error:
        print(f"vllm-teach: {error}", file=sys.stderr)
        return 1
    except OutputError as error:
        discard_output()
        if isinstance(error.__cause__, BrokenPipeError):
            return 141
        print(f"vllm-teach: the output cannot be written ({error}): send it elsewhere.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvllm-teach: interrupted", file=sys.stderr)
        return 130
    return 0
