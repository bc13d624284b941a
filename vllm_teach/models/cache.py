"""Where fetched and converted models live, and how a folder gets there whole or not at all.

A model folder is built under a temporary name beside its target and renamed at the end: renaming is one step for the
file system, so no reader ever sees half a model. A lock file per target lets one process build while others wait. The
operating system drops the lock when its holder dies, so what still has a temporary name while we hold the lock was
left by a dead builder and is removed.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock
from safetensors import SafetensorError, safe_open

from vllm_teach.errors import ModelLoadError


def cache_home() -> Path:
    """Return the folder for models: the environment variable VLLM_TEACH_HOME, else the user's cache folder."""
    home = os.environ.get("VLLM_TEACH_HOME")
    return Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("vllm_teach"))


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, a complete model folder, calling `build(temporary_folder)` first where it is not there.

    Whatever `build` raises passes through, with `target` as it was and the temporary folder gone. A second process
    that asks for the same target waits for the first. A target that is there but incomplete is replaced.
    """
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        for left_over in target.parent.glob(f"{target.name}.partial-*"):
            shutil.rmtree(left_over)
        if is_complete(target):
            return target
        with _temporary_folder(target) as folder:
            build(folder)
            if not is_complete(folder):
                raise ModelLoadError(f"what was built for {target} is no complete model: report this as a bug.")
            _apply_umask(folder)
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
    return target


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds the files of a converted model and none of its weight files is cut short."""
    weights = sorted(folder.glob("*.safetensors"))
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    if not weights or not all((folder / name).is_file() for name in needed):
        return False
    try:
        for file in weights:
            # Opening compares the length of the file with what its header promises.
            with safe_open(file, framework="np"):
                pass
    except SafetensorError:
        return False
    return True


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def _apply_umask(folder: Path) -> None:
    """Give folder and files the permissions a plain write gives: mkdtemp and safetensors write for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)
