"""Check and time the GPU kernels on the machine at hand: `python -m vllm_teach.validation.gpu`.

Runs from a plain checkout with torch, triton, numpy, transformers, safetensors, PyYAML and matplotlib; nothing needs to
be installed. Prints a table and writes data/results/<gpu>-<date>.json, after each section what there is so far. Ends
with exit code 0 when all checks passed, 1 when one failed, and 2 when there is no GPU to run on.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vllm_teach import resources
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError, VllmTeachError

# Time beyond the limit after which a run that hangs, say in a kernel, is ended. What was written stays.
_GRACE_SECONDS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with command-line arguments (those of the process for None) and return its exit code."""
    started = time.monotonic()
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments, started, shlex.join(sys.argv if argv is None else ["gpu", *argv]))
    except VllmTeachError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vllm_teach.validation.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the result file; data/results, and none in a dry run")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after so many minutes (default: 8)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run these sections only")
    parser.add_argument("--commit", help="the commit, where the files are no git checkout")
    parser.add_argument("--dry-run", action="store_true", help="tiny tensors in Triton's interpreter on the CPU")
    return parser


def _run(arguments: argparse.Namespace, started: float, command: str) -> int:
    if not 0 < arguments.minutes <= 60:
        raise InvalidArgumentError(f"--minutes is {arguments.minutes:g}; give a number of minutes up to 60.")
    _prepare(arguments.dry_run)
    from vllm_teach.validation.gpu import machine
    from vllm_teach.validation.gpu.plan import plan
    from vllm_teach.validation.gpu.result import Result, SectionResult, result_path, save
    from vllm_teach.validation.gpu.sections import run_sections
    from vllm_teach.validation.gpu.setting import Setting
    from vllm_teach.validation.gpu.table import format_result

    setting = Setting("cpu" if arguments.dry_run else "cuda", arguments.quick)
    sections = plan(setting, arguments.only)
    limit = arguments.minutes * 60
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commit = arguments.commit or machine.commit()
    result = Result(now, command, commit, setting.dry, limit, machine.describe(setting.device))
    folder = arguments.out or (None if setting.dry else resources.folder("data") / "results")
    path = result_path(folder, result) if folder else None

    def finished(done: list[SectionResult]) -> None:
        result.sections, result.seconds = done, round(time.monotonic() - started, 1)
        print(f"{done[-1].name}: {len(done[-1].records)} records, {done[-1].seconds:.0f} s", flush=True)
        if path:
            save(result, path)

    faulthandler.dump_traceback_later(limit + _GRACE_SECONDS, exit=True)
    try:
        run_sections(sections, limit, finished, started)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print("\n" + format_result(result))
    print(f"written to {path}" if path else "nothing was written")
    return 0 if result.passed else 1


def _prepare(dry_run: bool) -> None:
    """Raise unless the kernels can run: on a GPU, or for a dry run in Triton's interpreter, which it switches on."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("The package torch is not installed; pip install torch.") from error
    from vllm_teach.backends import triton_backend

    if dry_run:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise InvalidArgumentError("--dry-run needs a process that has not imported triton; start a new one.")
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise InvalidArgumentError(
            "PyTorch sees no CUDA device, and this script measures one; --dry-run runs its code on the CPU."
        )
    if find_spec("triton") is None:
        raise MissingDependencyError("The package triton is not installed; on Linux, pip install triton.")
    if (reason := triton_backend.unavailable()) is not None:
        raise InvalidArgumentError(reason)
