"""`make lab` in a fresh clone: makes its own environment and serves the first lesson."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

TOKEN = "lessons"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str, process: subprocess.Popen, log: Path, seconds: int) -> str:
    for _ in range(seconds * 2):
        assert process.poll() is None, f"make lab ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within {seconds} s:\n{log.read_text()[-3000:]}")


@pytest.mark.real_model
def test_make_lab_serves_the_first_lesson_from_a_fresh_clone(fresh_tree, tmp_path, smollm2_path):
    clone = shutil.copytree(fresh_tree, tmp_path / "clone")
    port, log = free_port(), tmp_path / "log"
    arguments = f"--no-browser --port {port} -- --IdentityProvider.token={TOKEN}"
    # A clean environment: the clone must make its own .venv, not borrow the one that runs this test.
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["JUPYTER_RUNTIME_DIR"] = str(tmp_path / "runtime")
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "lab", f"LAB_ARGS={arguments}"],
            cwd=clone, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(f"{base}/api/status?token={TOKEN}", process, log, seconds=420)
        front = wait_for(f"{base}/?token={TOKEN}", process, log, seconds=30)
        assert '"treePath": "00_start_here.ipynb"' in front
        lesson = wait_for(f"{base}/api/contents/00_start_here.ipynb?token={TOKEN}", process, log, seconds=10)
        assert '"type": "notebook"' in lesson
        assert str(clone / ".venv") in (clone / ".venv" / "bin" / "vllm-teach").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
        shutil.rmtree(clone)  # over a gigabyte, which pytest would keep for three runs
