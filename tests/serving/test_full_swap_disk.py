"""`vllm-teach serve` swaps to a disk that is full: before it starts, afterwards, or because its file lost its room."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_teach import LLM, SamplingParams

resource = pytest.importorskip("resource", reason="this system has no limits of that kind")

PROMPTS = ["The sea", "def read(", "import os", "class Node:", "for each in", "return", "if not", "with open("]
BODY = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
BLOCK_BYTES = 16384  # 4 tokens, K and V, 4 layers, 2 heads, 64 float32
# Eight requests of 16 blocks at once, on 40 blocks: most are preempted. The host has 24: some find no room there.
SWAP_BYTES = 24 * BLOCK_BYTES
ENGINE = ["--num-kv-blocks", "40", "--block-size", "4", "--max-model-len", "120", "--preemption-mode", "swap"]
COMMAND = [sys.executable, "-m", "vllm_teach.cli", "serve", "--model", "tiny", "--port", "0", "--dtype", "float32"]
COMMAND += [*ENGINE, "--swap-space", str(SWAP_BYTES / 2**30)]
IN_A_SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
IN_A_SMALL_DISK += ['mount -t tmpfs -o size=1m none "$0" && exec "$@"']


def run(command: list[str], largest_file: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one of them is killed on purpose
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=limit)


@pytest.fixture(scope="module")
def offline() -> list[str]:
    """The answers of an engine that never preempts."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    outputs = LLM("tiny", dtype="float32").generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder where each server finds a disk of 1 MiB, which only it and `seen_by` see."""
    if subprocess.run([*IN_A_SMALL_DISK, tmp_path, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a user mount a small disk")
    return tmp_path


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """A maker of (server's process, its URL)."""
    started = []

    def make(*arguments: object, disk: Path | None = None) -> tuple[subprocess.Popen[str], str]:
        command = [*COMMAND, *map(str, arguments)]
        started.append(run(command if disk is None else [*IN_A_SMALL_DISK, str(disk), *command]))
        return started[-1], started[-1].stdout.readline().split()[-1]

    yield make
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def seen_by(process: subprocess.Popen[str], path: Path) -> Path:
    return Path(f"/proc/{process.pid}/root{path}")


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def ask_all(url: str) -> list[httpx.Response]:
    """The answers to all prompts, asked at once."""

    def ask(prompt: str) -> httpx.Response:
        return httpx.post(url + "/generate", json={"prompt": prompt, **BODY}, timeout=60)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def figure(url: str, name: str, **labels: str) -> float:
    """One of the server's metrics."""
    families = text_string_to_metric_families(httpx.get(url + "/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples]
    [found] = [each for each in samples if each.name == name and labels.items() <= each.labels.items()]
    return found.value


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_a_disk_without_room_is_one_line_before_anything_is_accepted_and_is_not_filled(tmp_path):
    file = tmp_path / "swap"
    process = run([*COMMAND, "--engine", "thread", "--swap-file", str(file)], largest_file=SWAP_BYTES // 2)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    [line] = errors.splitlines()
    assert line.startswith(f"vllm-teach: swap_file={str(file)!r} cannot be made {SWAP_BYTES} bytes large (")
    assert "name a file in a folder with room, or lower swap_space" in line
    assert file.stat().st_size == 0


def test_a_disk_that_fills_up_while_it_serves_costs_no_answer(start, disk, offline):
    """The file's room was taken at the start. Who finds the swap space itself full is computed again, and counted."""
    process, url = start("--swap-file", disk / "swap", disk=disk)
    fill(seen_by(process, disk / "others"))
    assert os.statvfs(seen_by(process, disk)).f_bfree == 0
    for _ in range(2):
        answers = ask_all(url)
        assert [answer.json().get("text") for answer in answers] == [[text] for text in offline]
    assert figure(url, "vllm_teach:kv_cache_block_operations_total", operation="swap_in") > 0
    for mode in ("swap", "recompute"):
        assert figure(url, "vllm_teach:preemptions_total", mode=mode) > 0
    assert figure(url, "vllm_teach:kv_cache_blocks", state="held") == figure(url, "vllm:cpu_cache_usage_perc") == 0
    assert httpx.get(url + "/health").status_code == 200
    assert end(process) == (0, "")


def test_a_swap_file_that_loses_its_room_ends_the_engine_and_each_request_with_an_error(start, tmp_path, offline):
    """As on a full disk that copies on write, or when somebody empties the file: the system kills who writes there."""
    process, url = start("--swap-file", tmp_path / "swap")
    os.truncate(tmp_path / "swap", 0)
    answers = ask_all(url)
    failed = [answer for answer in answers if answer.status_code != 200]
    assert failed
    for answer in failed:
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "engine_dead"
        assert f"signal {signal.SIGBUS.value}" in error["message"]
        assert "swap file" in error["message"]
    for answer, text in zip(answers, offline, strict=True):
        assert answer in failed or answer.json()["text"] == [text]
    assert httpx.get(url + "/health").status_code == 503
    assert end(process) == (0, "")
