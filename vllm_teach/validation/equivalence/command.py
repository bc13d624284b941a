"""Compare the engine with transformers, token for token: `python -m vllm_teach.validation.equivalence`.

Greedy requests of mixed lengths run in engines whose settings, any two of them in every combination, must not change a
token. In float32 a differing token is excused only where transformers' own scores of the two lie within 1e-3, and is
listed. In bfloat16 rounding depends on the batch's shape, so the share of tokens that transformers would have chosen is
reported instead. Ends with exit code 0 when all passed, 1 when not, 2 when it cannot run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_teach.errors import InvalidArgumentError, VllmTeachError

if TYPE_CHECKING:
    from vllm_teach.validation.equivalence.configurations import Configuration


@dataclass(frozen=True)
class Size:
    """The longest prompt and output in tokens, and how many sampled requests of three completions there are."""

    most_inputs: int
    most_outputs: int
    num_sampled: int


FULL, QUICK = Size(1500, 128, 10), Size(200, 48, 4)
_TINY = {FULL: Size(384, 128, 10), QUICK: Size(96, 32, 4)}  # its context has 512 tokens
_REQUESTS, _QUICK_REQUESTS, _QUICK_CONFIGURATIONS = 64, 24, 4
_TEXT = "texts/corran_sound.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments (those of the process for None) and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments, shlex.join(sys.argv if argv is None else ["equivalence", *argv]))
    except VllmTeachError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vllm_teach.validation.equivalence", description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--configurations", type=int, metavar="N", help="the first N only (default: all)")
    parser.add_argument("--strength", type=int, default=2, help="how many settings meet in every combination")
    parser.add_argument("--requests", type=int, metavar="N", help="greedy requests (default: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--quick", action="store_true", help="24 shorter requests, 4 configurations")
    return parser


def _run(arguments: argparse.Namespace, command: str) -> int:
    import torch

    from vllm_teach import data
    from vllm_teach.models.load import load_model
    from vllm_teach.models.resolve import resolve_model
    from vllm_teach.models.tokenizer import load_tokenizer
    from vllm_teach.performance.environment import describe_environment
    from vllm_teach.validation.equivalence.check import Checker, Outcome
    from vllm_teach.validation.equivalence.configurations import list_configurations
    from vllm_teach.validation.equivalence.reference import Reference
    from vllm_teach.validation.equivalence.report import HEAD, format_outcome, format_summary, to_json
    from vllm_teach.validation.equivalence.workload import draw_greedy, draw_sampled

    started = time.monotonic()
    configurations = _first(list_configurations(arguments.strength), arguments)
    path, dtype = resolve_model(arguments.model), getattr(torch, arguments.dtype)
    tokenizer = load_tokenizer(path)
    text_ids = tokenizer.encode(data.path(_TEXT).read_text(encoding="utf-8"))
    size = QUICK if arguments.quick else FULL
    size = _TINY[size] if arguments.model == "tiny" else size
    count = arguments.requests or (_QUICK_REQUESTS if arguments.quick else _REQUESTS)
    checker = Checker(
        load_model(path, dtype),
        tokenizer,
        Reference(path),
        draw_greedy(text_ids, count, size.most_inputs, size.most_outputs),
        draw_sampled(text_ids, size.num_sampled, size.most_outputs, size.most_outputs),
        rival=None if dtype == torch.float32 else Reference(path, dtype),
        demanding=count >= _REQUESTS and not arguments.quick,
    )
    print(
        f"{arguments.model}, {arguments.dtype}, {torch.get_num_threads()} threads: {count} greedy requests", flush=True
    )
    drawn = checker.prepare(lambda line: print(line, flush=True))
    print("\n".join(f"sampled alone: {difference}" for difference in drawn) + f"\n{HEAD}", flush=True)
    outcomes: list[Outcome] = []
    for number, configuration in enumerate(configurations, start=1):
        outcomes.append(checker.check(configuration))
        print(format_outcome(number, outcomes[-1]), flush=True)
        if arguments.json:
            about = {"command": command, "model": arguments.model, "dtype": arguments.dtype, "requests": count}
            environment = asdict(describe_environment())
            seconds = round(time.monotonic() - started, 1)
            result = to_json(outcomes, **about, seconds=seconds, environment=environment)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(format_summary(outcomes))
    return 0 if all(each.passed for each in outcomes) and all(each.excused for each in drawn) else 1


def _first(configurations: list[Configuration], arguments: argparse.Namespace) -> list[Configuration]:
    """Return as many as were asked for."""
    count = arguments.configurations
    if count is None:
        count = _QUICK_CONFIGURATIONS if arguments.quick else len(configurations)
    if not count >= 1:
        raise InvalidArgumentError(f"--configurations {count} checks nothing: give a number from 1.")
    return configurations[:count]
