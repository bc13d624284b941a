"""Where fetched and converted models live, and how a folder gets there whole or not at all.

A model folder is built under a temporary name beside its target and renamed at the end: renaming is one step for the
file system, so no reader ever sees half a model. A lock file per target lets one process build while others wait. The
operating system drops the lock when its holder dies, so what still has a temporary name while we hold the lock was
left by a dead builder and is removed.
"""

import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock
from safetensors import SafetensorError, safe_open

from vllm_teach.errors import CacheError, ModelLoadError, ModelNotFoundError, VllmTeachError
from vllm_teach.models.fields import read_json
from vllm_teach.models.weight_files import weight_files

# A converted model's files beside its weights.
_JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_HOME = "VLLM_TEACH_HOME"


def cache_home() -> Path:
    """Return the folder for models: the environment variable VLLM_TEACH_HOME, else the user's cache folder."""
    home = os.environ.get(_HOME)
    try:
        return Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("vllm_teach"))
    except RuntimeError as error:  # "~name" where there is no such user
        raise CacheError(f"{_HOME} is {home!r}, which is no folder ({error}): set it to one.") from error


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, a complete model folder, calling `build(temporary_folder)` first where it is not there.

    When `build` raises, `target` is as it was and the temporary folder gone. A second process that asks for the same
    target waits for the first. A target that is there but incomplete is replaced. Raises CacheError when the folder
    cannot be written or is full, for `build` too.
    """
    if is_complete(target):
        return target
    with _cache_errors(target):
        return _build(target, build)


def _build(target: Path, build: Callable[[Path], None]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        for left_over in target.parent.glob(f"{glob.escape(target.name)}.partial-*"):
            shutil.rmtree(left_over)
        if is_complete(target):
            return target
        with _temporary_folder(target) as folder:
            build(folder)
            if not is_complete(folder):
                raise ModelLoadError(f"what was built for {target} is no complete model: report this as a bug.")
            apply_umask(folder)
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
    return target


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds a converted model whose JSON files parse and whose weight files are not cut."""
    try:
        for name in _JSON_FILES:
            read_json(folder / name)
        for file in weight_files(folder):
            # Opening compares the length of the file with what its header promises.
            with safe_open(file, framework="np"):
                pass
    except (ModelLoadError, ModelNotFoundError, SafetensorError):
        return False
    return True


@contextmanager
def _cache_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except VllmTeachError:  # some are OSErrors too
        raise
    # What safetensors cannot write, it reports as an error of its own.
    except (OSError, SafetensorError) as error:
        home = os.environ.get(_HOME)
        raise CacheError(
            f"{target} cannot be written ({error}): set {_HOME}, which is {repr(home) if home else 'not set'}, to a "
            "folder that you may write and that has room."
        ) from error


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def apply_umask(folder: Path) -> None:
    """Give folder and files the permissions a plain write gives: mkdtemp and safetensors write for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)
