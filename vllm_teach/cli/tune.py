"""`vllm-teach tune`: measure this machine once, and keep what was found for those who ask."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_teach.cli.arguments import add_json, add_model, count
from vllm_teach.cli.output import check_output_file, write, write_json
from vllm_teach.errors import InvalidArgumentError


def add_tune(commands: Any) -> None:
    """Add `tune` to the subparsers of `vllm-teach`."""
    tune = commands.add_parser(
        "tune",
        help="measure once which attention backend is fastest here at which size; with --steps, what a step takes",
        description="Time the attention backends, for the policy 'measured'. With --steps, time steps of the engine "
        "and fit the model of their costs that simulations of this machine use.",
    )
    tune.add_argument("--steps", action="store_true", help="measure steps of the engine instead (some minutes)")
    add_model(tune)
    tune.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], help="(default: auto)")
    tune.add_argument("--rounds", type=count, help="all steps are measured once a round (default: 5)")
    add_json(tune)
    tune.add_argument("--quiet", action="store_true", help="no progress bar")
    tune.set_defaults(run=run_tune, model=None)  # None tells what was not given


def run_tune(arguments: argparse.Namespace) -> None:
    """Measure, write this machine's file, and print what was found."""
    if arguments.json:
        check_output_file(arguments.json)
    if arguments.steps:
        _tune_steps(arguments)
        return
    for option in ("model", "dtype", "rounds", "json"):
        if getattr(arguments, option) is not None:
            raise InvalidArgumentError(f"--{option} belongs to --steps: give that, too, or leave it out.")
    from vllm_teach.performance.tuning import tune

    write(tune(progress=not arguments.quiet))
    write("\n`vllm_teach.backends.attend` and `explain` use this table when they are called with policy='measured'.")


def _tune_steps(arguments: argparse.Namespace) -> None:
    from vllm_teach.performance.cost_model.tune import format_fit, tune_steps

    given = {name: value for name in ("model", "dtype", "rounds") if (value := getattr(arguments, name)) is not None}
    fit = tune_steps(**given, progress=not arguments.quiet)
    write(format_fit(fit))
    if arguments.json:
        write_json(arguments.json, {**fit.to_json(), "command": arguments.command_line})
