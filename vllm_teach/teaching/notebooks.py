"""Build the lessons: run each notebook in a fresh kernel and commit it in canonical form.

    python -m vllm_teach.teaching.notebooks build [--check [--execute]] [NOTEBOOK ...]
    python -m vllm_teach.teaching.notebooks compare [NOTEBOOK ...]

`build` runs and rewrites; `--check` reads only, and fails where a committed file is not what `build` would write or a
cell breaks a rule; `--check --execute` also runs each notebook again and compares the texts. `compare` runs nbval, as
`make test` does, in the environment in which `build` ran the lessons.

What a lesson's author keeps to (canonical.py and notebook_rules.py hold the rules as code):

- The `.ipynb` is the source of truth and is committed with its outputs, written by `build` and by nothing else. Edit
  it in JupyterLab, or as a script outside the repository: `jupytext --to py:percent --output /tmp/x.py
  notebooks/01_x.ipynb`, edit, `jupytext --to ipynb --output notebooks/01_x.ipynb /tmp/x.py`, then `build`. In such a
  script a cell's tags stand in its marker: `# %% tags=["exercise:causal_mask"]`.
- The first code cell holds all imports and ends with `begin("01_naive_attention")`, which pins threads and seeds and
  prints a line. No other cell imports. No magics.
- Every code cell has output that nbval compares: printed text or the value of the last expression. nbval does not look
  at pictures, so a cell with a figure also prints a number from the figure's data (`<Figure size …>` does not count).
- A cell that shows times, this machine's rates or its rounding errors carries the tag `nbval-ignore-output` and uses
  what measures them (`notebook_rules.measures` knows the names); at most a third of the cells. No other way of
  switching a comparison off is allowed. A cell that shows an error on purpose: `raises-exception`.
- At most 15 lines of code a cell (blank lines, comments, docstrings and imports not counted). Nothing on stderr, no
  absolute path, at most 90 s for the whole notebook on two cores.
- An exercise is a markdown cell with the statement, a cell tagged `exercise:<name>` with the stub (signature,
  docstring, `raise NotImplementedError`), then a cell `check.<name>(<function>)`. The answer is in
  `solutions/<lesson>.ipynb`, in a cell tagged `solution:<name>`, again followed by the check.
- A widget is `explore(render, readout=…, step=range(8))` as a cell's last expression, and a cell with
  `twin(render, [{"step": 0}, {"step": 5}], readout=…)` beside it, whose printed lines are compared.
- Sections, in this order, each heading free to go on after a colon: `## The problem`, `## The idea, by hand`,
  `## The idea, in code`, `## It is right`, `## It pays`, `## Where it breaks`, `## Exercises`, `## Reference check`,
  `## In production`, `## Summary`. The first cell has the title, the question, what the reader is then "able to" do
  (or "you can"), "N minutes", and which lesson it "builds on"; one of the first three code cells draws the system map.
"""

import argparse
import difflib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_teach import resources
from vllm_teach.errors import MissingDependencyError, VllmTeachError, installs
from vllm_teach.openmp import WAIT_SHORTLY
from vllm_teach.teaching import canonical, notebook_rules

CELL_TIMEOUT_S = 120
NOTEBOOK_LIMIT_S = 90.0

# What decides a lesson's text besides its code: lessons are built and compared in it.
KERNEL_ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    **WAIT_SHORTLY,
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


class NotebookError(VllmTeachError):
    """A notebook that cannot be committed: a cell raised, hung, wrote to stderr, or the whole took too long."""


@dataclass
class Report:
    """What happened to one notebook."""

    path: Path
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    written: bool = False


def read(path: Path) -> Any:
    """Read a notebook as nbformat 4. Raises NotebookError for a file that is none."""
    nbformat = _import("nbformat")
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)  # `read` only logs what is wrong
    except OSError:
        raise
    except Exception as error:  # anything, depending on what is wrong: also TypeError and RecursionError
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise NotebookError(f"{path.name} is not a notebook ({why}): write it with JupyterLab or jupytext.") from error
    return notebook


def to_text(notebook: Any) -> str:
    """The bytes of a committed file, as text: sorted keys, one space of indentation, one newline at the end."""
    return str(_import("nbformat").writes(notebook, version=4)).rstrip("\n") + "\n"


def execute(notebook: Any, folder: Path, *, timeout_s: int = CELL_TIMEOUT_S) -> Any:
    """Run a copy of `notebook` in a fresh kernel of this interpreter, working in `folder`, and return the copy.

    Raises NotebookError when a cell raises (unless it is tagged raises-exception), hangs, or the kernel dies.
    """
    nbclient = _import("nbclient")
    fresh = canonical.canonicalise(notebook)
    for _, cell in notebook_rules.code_cells(fresh):
        cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        fresh,
        kernel_manager_class=_this_interpreter(),
        extra_arguments=["--log-level=ERROR"],
        timeout=timeout_s,
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        client.execute(env={**os.environ, **KERNEL_ENVIRONMENT})
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
        raise NotebookError(f"{error}\nA cell failed: mend it and build again.") from error
    except nbclient.exceptions.DeadKernelError as error:
        raise NotebookError(
            "The kernel died: look for a crash in native code, or give it more memory, and build again."
        ) from error
    return fresh


def _this_interpreter() -> type:
    """A kernel manager that always starts this Python, whatever kernel named python3 a user has installed."""
    manager, kernelspec = _import("jupyter_client"), _import("jupyter_client.kernelspec")
    ipykernel = _import("ipykernel.kernelspec")

    class Specs(kernelspec.KernelSpecManager):  # type: ignore[name-defined]
        def get_kernel_spec(self, kernel_name: str) -> Any:
            return kernelspec.KernelSpec(resource_dir=ipykernel.RESOURCES, **ipykernel.get_kernel_dict())

    class Manager(manager.AsyncKernelManager):  # type: ignore[name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**{"kernel_spec_manager": Specs(), **options})

    return Manager


def build(path: Path, *, timeout_s: int = CELL_TIMEOUT_S, limit_s: float = NOTEBOOK_LIMIT_S) -> Report:
    """Run a notebook and write it canonically; on a NotebookError or an obstacle the file stays as it was.

    A broken rule of `notebook_rules` is reported too, but the outputs are written: the author wants to see them.
    """
    report = Report(path)
    notebook = read(path)
    started = time.perf_counter()
    try:
        fresh = canonical.canonicalise(execute(notebook, path.parent, timeout_s=timeout_s))
    except NotebookError as error:
        report.problems = [str(error)]
        return report
    finally:
        report.seconds = time.perf_counter() - started
    report.problems = obstacles(fresh, report.seconds, limit_s)
    if not report.problems:
        write_atomically(path, to_text(fresh))
        report.written = True
        report.problems = notebook_rules.cell_problems(fresh)
    return report


def obstacles(notebook: Any, seconds: float, limit_s: float = NOTEBOOK_LIMIT_S) -> list[str]:
    """What keeps a freshly run notebook from being written: time, stderr, absolute paths."""
    problems = [str(p) for p in notebook_rules.untidy(notebook) if isinstance(p, notebook_rules.Obstacle)]
    if seconds > limit_s:
        problems.append(f"the notebook took {seconds:.0f} s, and {limit_s:.0f} s are allowed.")
    return problems


def check(path: Path, *, run: bool = False, timeout_s: int = CELL_TIMEOUT_S) -> Report:
    """Compare a committed notebook with its canonical form and the rules; with `run`, also with a fresh run."""
    report = Report(path)
    notebook = read(path)
    if path.read_text(encoding="utf-8") != to_text(canonical.canonicalise(notebook)):
        report.problems.append("the file is not in canonical form: run the build command instead of saving it.")
    report.problems += notebook_rules.cell_problems(notebook)
    if run:
        started = time.perf_counter()
        try:
            fresh = canonical.canonicalise(execute(notebook, path.parent, timeout_s=timeout_s))
            report.problems += differences(notebook, fresh)
        except NotebookError as error:
            report.problems.append(str(error))
        report.seconds = time.perf_counter() - started
    return report


def differences(committed: Any, fresh: Any) -> list[str]:
    """Cells whose compared texts changed, with the lines that did."""
    problems = []
    pairs = zip(notebook_rules.code_cells(committed), notebook_rules.code_cells(fresh), strict=True)
    for (index, before), (_, after) in pairs:
        old, new = notebook_rules.compared_values(before), notebook_rules.compared_values(after)
        if old == new or notebook_rules.is_ignored(before):
            continue
        lines = [
            line
            for kind in sorted({*old, *new})
            for line in difflib.unified_diff(
                "\n".join(old.get(kind, [])).splitlines(), "\n".join(new.get(kind, [])).splitlines(), lineterm="", n=0
            )
            if line[:3] not in ("---", "+++", "@@ ")
        ]
        problems.append(f"cell {index} printed something else this time:\n    " + "\n    ".join(lines))
    return problems


def nbval_command(*targets: Path | str) -> list[str]:
    """The command that runs `targets` and compares their texts; run it with KERNEL_ENVIRONMENT.

    Raises NotebookError outside a checkout, which alone has the file of patterns that nbval ignores.
    """
    root = resources.checkout_root()
    if root is None:
        raise NotebookError("tests/sanitize.cfg is not here: compare notebooks in a checkout of the repository.")
    options = ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT_S}"]
    sanitize = ["--nbval-sanitize-with", str(root / "tests" / "sanitize.cfg")]
    return [sys.executable, "-m", "pytest", *options, *sanitize, *map(str, targets)]


def compare(targets: Sequence[Path]) -> int:
    """Run nbval on notebooks, by default all; return its exit status. Raises NotebookError outside a checkout."""
    command = nbval_command(*(targets or [resources.folder("notebooks")]))
    return subprocess.run(command, env={**os.environ, **KERNEL_ENVIRONMENT}, check=False).returncode


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file and rename, so that an interrupted build leaves the old notebook whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def all_notebooks() -> list[Path]:
    """Every committed notebook, lessons before solutions."""
    root = resources.folder("notebooks")
    found = [path for path in root.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    return sorted(found, key=lambda path: (len(path.relative_to(root).parts), path))


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"{name} is not installed: run {installs('dev')}.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when there was nothing to complain about."""
    parser = argparse.ArgumentParser(prog="python -m vllm_teach.teaching.notebooks", description="Build the lessons.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="run notebooks and write them in canonical form")
    command.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    command.add_argument("--execute", action="store_true", help="with --check: run the notebooks and compare texts")
    command.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="default: all lessons")
    command = commands.add_parser("compare", help="run notebooks with nbval and compare their texts")
    command.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="default: all lessons")
    options = parser.parse_args(arguments)
    if options.command == "compare":
        try:
            return compare(options.notebooks)
        except NotebookError as error:
            parser.error(str(error))
    if options.execute and not options.check:
        parser.error("--execute goes with --check; without it, build always executes.")
    failed = False
    for path in options.notebooks or all_notebooks():
        try:
            report = check(path, run=options.execute) if options.check else build(path)
        except (NotebookError, OSError) as error:
            report = Report(path, [str(error)])
        failed |= bool(report.problems)
        state = "written" if report.written else "kept as it was" if not options.check else "checked"
        print(f"{path.name}: {state}, {report.seconds:.1f} s, {len(report.problems)} problems", flush=True)
        for problem in report.problems:
            print(f"  {problem}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
