"""A peer that serves in a process of its own, started with whichever Python has it: see `server` for the protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from vllm_teach.errors import EngineError
from vllm_teach.models.gguf_writer import write_gguf
from vllm_teach.openmp import without_wait_shortly
from vllm_teach.performance.workload import Workload

_SERVER = Path(__file__).with_name("server.py")
_SECONDS_TO_END = 5


@dataclass(frozen=True)
class System:
    """What a system is called where it is installed: its module, and the package that brings it.

    `prepare` makes what it loads of a model's folder, in a folder of its own, and returns its path.
    """

    module: str
    package: str
    prepare: Callable[[Path, Path, torch.dtype], Path]


def _as_it_is(folder: Path, scratch: Path, dtype: torch.dtype) -> Path:
    return folder


def _as_gguf(folder: Path, scratch: Path, dtype: torch.dtype) -> Path:
    write_gguf(folder, scratch / "model.gguf", dtype)
    return scratch / "model.gguf"


SYSTEMS = {
    "vllm": System("vllm", "vllm", _as_it_is),
    "llama.cpp": System("llama_cpp", "llama-cpp-python", _as_gguf),
}


class ProcessPeer:
    """`name`, a key of `SYSTEMS`, in a process that `load` starts and `close` ends.

    `python` is the interpreter that has it, this one's by default. `version` and `how` (how it batches, in which
    precision) are known once it is loaded. Its weights are those in `model_path`, in `dtype`; it computes in as many
    threads as PyTorch does here.
    """

    def __init__(self, name: str, model_path: Path, dtype: torch.dtype, python: str = sys.executable) -> None:
        self.name, self.python = name, python
        self.version = self.how = ""
        self._model_path, self._dtype = model_path, dtype
        self._system = SYSTEMS[name]
        self._process: subprocess.Popen[str] | None = None
        self._log: Path | None = None
        self._cleanup = ExitStack()

    def available(self) -> str | None:
        """Return None if its interpreter has it, else the reason why not, as a sentence. Loads nothing."""
        try:
            found = subprocess.run(
                [self.python, str(_SERVER), self._system.module],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=60,
                check=False,
                encoding="utf-8",
                errors="replace",
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return f"{self.python} cannot be run ({error}): name its interpreter as --peer-python {self.name}=PATH."
        answer = _last_line(found.stdout)
        if answer == "True":
            return None
        if answer == "False":
            return (
                f"It is not installed in {self.python}: pip install {self._system.package} there, or name an "
                f"interpreter that has it, as --peer-python {self.name}=PATH."
            )
        words = _last_line(found.stderr) or f"exit status {found.returncode}"
        return f"{self.python} is no Python that works ({words}): name one as --peer-python {self.name}=PATH."

    def load(self, max_len: int, max_seqs: int, cache_bytes: int) -> None:
        """Start it for sequences of up to `max_len` tokens: `max_seqs` of them, or (vLLM) `cache_bytes` of K and V.

        Raises ModelLoadError where the model cannot be given to it, EngineError where it fails, with its own words, or
        cannot be started.
        """
        threads = torch.get_num_threads()
        try:
            model = self._start(threads)
        except OSError as error:
            raise EngineError(
                f"{self.name} cannot be started ({error}): see that {tempfile.gettempdir()} has room for its model "
                f"and that {self.python} is there."
            ) from error
        answer = self._ask(
            system=self.name,
            model=str(model),
            dtype=str(self._dtype).removeprefix("torch."),
            threads=threads,
            max_len=max_len,
            max_seqs=max_seqs,
            cache_bytes=cache_bytes,
        )
        self.version, self.how = answer["version"], answer["how"]

    def run(self, workload: Workload) -> float:
        """Serve all requests to their last token and return its seconds; `load` comes first. Raises EngineError."""
        return float(self._ask(prompts=workload.prompts, output_lens=workload.output_lens)["seconds"])

    def close(self) -> None:
        """End the process and all that it started. Can be called twice."""
        process, self._process = self._process, None
        with self._cleanup:
            if process is not None:
                _end(process)

    def _start(self, threads: int) -> Path:
        """Prepare the model in a folder of its own, start the process, and return what it is to load."""
        scratch = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="vllm_teach-peer-")))
        model = self._system.prepare(self._model_path, scratch, self._dtype)
        self._log = scratch / "log"
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": str(threads)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self.python, str(_SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                errors="replace",
                env=without_wait_shortly(os.environ) | offline,
                start_new_session=True,  # a Ctrl-C is this process's to handle: it ends the other in order
            )
        return model

    def _ask(self, **message: object) -> dict[str, Any]:
        if self._process is None:
            raise EngineError(f"{self.name} is not loaded: call `load` first.")
        to_it, from_it = _pipes(self._process)
        line = ""
        with suppress(BrokenPipeError):  # it has ended, which the error says
            to_it.write(json.dumps(message) + "\n")
            to_it.flush()
            line = from_it.readline()
        answer = _parsed(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise EngineError(f"{self.name} failed: {str(answer['error']).removesuffix('.')}.")
        return answer

    def _last_words(self) -> str:
        """Return the last line on the standard error of a process that is gone."""
        assert self._log is not None
        last = _last_line(self._log.read_text(encoding="utf-8", errors="replace"))
        return f"its process ended{f' ({last})' if last else ''}"


def _last_line(text: str) -> str:
    """Return the last line that has anything in it, "" where there is none."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def _parsed(line: str) -> dict[str, Any]:
    """Return an answer. A line that is none, as an interpreter may print before `server` begins, makes an error."""
    with suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict):
            return answer
    return {"error": f"its process printed {line.strip()[:80]!r} where an answer was due"}


def _end(process: subprocess.Popen[str]) -> None:
    """End it with all that it started: in order if it hears, else, or if one more Ctrl-C comes meanwhile, by force."""
    to_it, from_it = _pipes(process)
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    try:
        with suppress(BrokenPipeError):
            to_it.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
    finally:
        if hasattr(os, "killpg"):  # who outlives a parent that died is no child of it any more, but is in its group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(started, _SECONDS_TO_END)
        from_it.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Return the process's standard input and output."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
