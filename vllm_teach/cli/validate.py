"""`vllm-teach validate`: every published figure beside what is found here, and a verdict that follows from a rule."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from vllm_teach.cli.output import write
from vllm_teach.errors import InvalidArgumentError


def add_validate(commands: Any) -> None:
    """Add `validate` to the subparsers of `vllm-teach`."""
    parser = commands.add_parser(
        "validate",
        help="the articles' figures beside what is measured, counted or modelled here, with a verdict on each",
        description="Run each published row's experiment and print claim, findings and verdict. No claim is edited.",
    )
    parser.add_argument("--table", action="append", metavar="ID", help="this table only; may be given more than once")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, fewer repetitions: about two minutes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it all, too: FILE.json or FILE.md")
    parser.add_argument("--list", action="store_true", help="only say which experiments there are")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run_validate)


def run_validate(arguments: argparse.Namespace) -> None:
    """Audit the tables that are asked for, all by default, and print the result."""
    from vllm_teach.validation.audit.experiment import load_experiments
    from vllm_teach.validation.audit.lab import Lab
    from vllm_teach.validation.audit.report import format_audit, format_list
    from vllm_teach.validation.audit.result_file import check_out, write_audit
    from vllm_teach.validation.audit.run import audit_tables
    from vllm_teach.validation.tables import get_table

    wanted = None if arguments.table is None else [get_table(table_id).id for table_id in arguments.table]
    chosen = [each for each in load_experiments() if wanted is None or each.table_id in wanted]
    if arguments.list:
        if arguments.out is not None:
            raise InvalidArgumentError(f"--out is {str(arguments.out)!r}, but --list measures nothing: leave one out.")
        write(format_list((each.table_id, each.key, each.about) for each in chosen))
        return
    if arguments.out is not None:
        check_out(arguments.out)
    lab = Lab(arguments.device, arguments.quick)
    # Otherwise PyTorch's profiler prints two lines to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from tqdm import tqdm

    with tqdm(total=len(chosen), desc="validate", disable=arguments.quiet) as bar:

        def announce(experiment: Any) -> None:
            bar.set_postfix_str(f"{experiment.table_id}: {experiment.key}")
            bar.update()

        audit = audit_tables(lab, wanted, announce, command=arguments.command_line)
    write(format_audit(audit))
    if arguments.out is not None:
        write_audit(arguments.out, audit)
        write(f"\nwritten to {arguments.out}")
