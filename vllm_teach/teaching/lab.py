"""`vllm-teach lab`: open JupyterLab on the lessons, in the checkout or in a copy that belongs to the reader."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vllm_teach import resources
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError, VllmTeachError, installs

FIRST_LESSON = "00_start_here.ipynb"


def list_lessons() -> list[str]:
    """Return the file names of the lessons in reading order."""
    return sorted(path.name for path in resources.folder("notebooks").glob("[0-9][0-9]_*.ipynb"))


def prepare_lessons(target: Path | None = None) -> Path:
    """Return a folder of lessons that the reader may write to.

    In a checkout that is `notebooks/` itself, unless `target` is given. Otherwise the packaged lessons are copied to
    `target` (default `./vllm-teach-lessons`); a file that is already there is the reader's and stays as it is. Raises
    InvalidArgumentError when they cannot be copied there.
    """
    if target is None and resources.checkout_root():
        return resources.folder("notebooks")
    target = target or Path.cwd() / "vllm-teach-lessons"
    try:
        _copy_lessons(target)
    except VllmTeachError:  # some are OSErrors too
        raise
    except OSError as error:
        raise InvalidArgumentError(
            f"the lessons cannot be copied to {str(target)!r} ({error}): name a folder that you may write with --dir."
        ) from error
    return target


def _copy_lessons(target: Path) -> None:
    source = resources.folder("notebooks")
    for path in sorted(source.rglob("*.ipynb")):
        copy = target / path.relative_to(source)
        if ".ipynb_checkpoints" not in path.parts and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def lab_command(folder: Path, *, browser: bool, port: int | None, extra: Sequence[str] = ()) -> list[str]:
    """Return the command line that serves `folder` with JupyterLab, opened on the first lesson.

    Raises MissingDependencyError when JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None:
        raise MissingDependencyError(f"JupyterLab is not installed: run {installs('lab')}.")
    command = [sys.executable, "-m", "jupyterlab", str(folder / FIRST_LESSON), f"--ServerApp.root_dir={folder}"]
    # The address that a machine without a screen prints leads to the lesson, too; no news dialog lies over it.
    command += [f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    if not browser:
        command.append("--no-browser")
    if port is not None:
        command += [f"--port={port}", "--ServerApp.port_retries=0"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # a container's usual user; JupyterLab refuses it otherwise
    return [*command, *extra]


def open_lab(target: Path | None, *, browser: bool, port: int | None, extra: Sequence[str] = ()) -> None:
    """Replace this process by JupyterLab, so that Ctrl-C and signals reach it directly; never returns."""
    command = lab_command(prepare_lessons(target), browser=browser, port=port, extra=extra)
    if os.name == "nt":  # there execv starts a second process and ends this one, and the console loses its child
        raise SystemExit(subprocess.call(command))
    os.execv(command[0], command)
