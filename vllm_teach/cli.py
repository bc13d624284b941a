"""The command line: `vllm-teach info | fetch | lab | generate`. Each command imports only what it needs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_teach import __version__
from vllm_teach.errors import VllmTeachError


def run_info(arguments: argparse.Namespace) -> None:
    """Print versions, device, threads and the attention backends."""
    from vllm_teach.models.resolve import describe_models
    from vllm_teach.performance.environment import describe_environment, format_environment

    print(format_environment(describe_environment()))
    print("\nmodels")
    for name, state in describe_models().items():
        print(f"  {name:<14}{state}")


def run_fetch(arguments: argparse.Namespace) -> None:
    """Fetch the real model once; afterwards everything runs offline."""
    from vllm_teach.models.fetch import fetch_smollm2

    print(fetch_smollm2(progress=not arguments.quiet))


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
        print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


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
    lab.add_argument("--port", type=int, help="serve on exactly this port")
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a typed error becomes one line on stderr and exit status 1."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except VllmTeachError as error:
        print(f"vllm-teach: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvllm-teach: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
