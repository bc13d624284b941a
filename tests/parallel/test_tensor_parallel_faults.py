"""Ranks that fail, die, hang, or are left behind: a typed error soon, and no process that stays."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import EngineDeadError, EngineError, InvalidArgumentError, OutOfMemoryError
from vllm_teach.parallel.worker_processes import WorkerProcesses

PROMPT = [1, 2, 3, 4, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ARGUMENTS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 64,
    "num_kv_blocks": 32,
    "attention_backend": "naive",
}


@pytest.fixture
def make() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []
    threads = torch.get_num_threads()

    def build(**arguments: Any) -> LLM:
        made.append(LLM("tiny", tensor_parallel_size=2, **ARGUMENTS | arguments))
        return made[-1]

    yield build
    for llm in made:
        llm.close()
    torch.set_num_threads(threads)


def worker(llm: LLM) -> int:
    (pid,) = llm.engine.ranks.processes.pids
    return pid


def generate(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def assert_dead(llm: LLM, match: str) -> None:
    """It says why at once, holds nothing, and its worker is no more."""
    with pytest.raises(EngineDeadError, match=match):
        generate(llm)
    usage = llm.engine.kv.usage()
    assert usage.held_blocks == 0
    assert not llm.engine.has_unfinished_requests()
    assert not psutil.pid_exists(worker(llm))


def test_a_worker_killed_between_steps(make) -> None:
    llm = make()
    generate(llm)
    told = threading.Event()
    llm.engine.ranks.when_one_dies(told.set)
    os.kill(worker(llm), signal.SIGKILL)
    assert told.wait(20), "an idle engine hears of it, too"
    assert_dead(llm, r"worker of rank 1 \(pid \d+\) was killed by signal 9: load")
    assert_dead(llm, r"worker of rank 1 \(pid \d+\) was killed by signal 9: load")


@pytest.fixture
def trap(programs: str, tmp_path: Path) -> tuple[Any, Path]:
    """(an attention_pattern, the file that tells the worker what to do in its next forward pass)."""
    order = tmp_path / "order"
    return import_module("trap").Trap(os.getpid(), str(order)), order


def test_a_worker_killed_in_a_step(make, trap) -> None:
    pattern, order = trap
    llm = make(attention_pattern=pattern)
    expected = generate(llm)
    assert len(expected) == 8
    order.write_text("die")
    assert_dead(llm, r"worker of rank 1 \(pid \d+\) was killed by signal 9: load")


def test_a_worker_that_hangs_in_a_step(make, trap) -> None:
    pattern, order = trap
    llm = make(attention_pattern=pattern, distributed_timeout_seconds=2.0)
    generate(llm)
    order.write_text("stop")
    assert_dead(llm, r"lost the other ranks \(.*\): load")


def test_a_worker_that_hangs_between_steps(make) -> None:
    llm = make(distributed_timeout_seconds=2.0)
    generate(llm)
    os.kill(worker(llm), signal.SIGSTOP)
    assert_dead(llm, r"lost the other ranks \(.*\): load")


@pytest.mark.parametrize("order", [("raise", EngineError, "RuntimeError"), ("memory", OutOfMemoryError, "MemoryError")])
def test_a_step_that_fails_is_not_the_end(make, trap, order: tuple) -> None:
    """On one rank, on all alike, by an interrupt in the midst of the pass: the ranks are in step afterwards."""
    pattern, file = trap
    what, kind, name = order
    llm = make(attention_pattern=pattern)
    expected = generate(llm)

    file.write_text(what)
    with pytest.raises(kind, match=rf"forward pass failed \({name}\('caught in the trap'\) on rank 1\)") as caught:
        generate(llm)
    assert type(caught.value) is kind
    assert llm.engine.kv.usage().held_blocks == 0
    assert generate(llm) == expected

    for error in (ZeroDivisionError("mine alone"), KeyboardInterrupt()):

        def broken(x: torch.Tensor, error: BaseException = error) -> torch.Tensor:
            raise error

        llm.model.model.layers[2].mlp.widen = broken
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EngineError):
            generate(llm)
        del llm.model.model.layers[2].mlp.widen
        assert llm.engine.kv.usage().held_blocks == 0
        assert generate(llm) == expected


def test_a_pass_that_fails_before_it_begins_is_not_the_end(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory for what attention reads runs out, the other rank is in the midst of its pass."""
    llm = make(kv_cache_dtype="int8")
    expected = generate(llm)

    def no_room(*arguments: Any) -> None:
        raise MemoryError("no room for numbers")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_teach.engine.model_runner.DequantizedBlocks", no_room)
        with pytest.raises(OutOfMemoryError, match="no room for numbers"):
            generate(llm)
    assert llm.engine.kv.usage().held_blocks == 0
    assert generate(llm) == expected


def test_a_rank_waits_for_one_that_loads_for_longer_than_a_step_may_take(make, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = WorkerProcesses.wait_until_ready

    def late(workers: WorkerProcesses, patience: float) -> None:
        wait(workers, patience)
        time.sleep(3.0)

    monkeypatch.setattr(WorkerProcesses, "wait_until_ready", late)
    llm = make(distributed_timeout_seconds=2.0)
    assert len(generate(llm)) == 8


def test_a_cache_that_a_rank_has_no_room_for(make, tmp_path: Path) -> None:
    """Its swap file cannot be made, where rank 0's can."""
    (tmp_path / "swap.rank1").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"on rank 1\): "):
        make(swap_space=0.001, preemption_mode="swap", swap_file=tmp_path / "swap")
    assert not [each for each in psutil.Process().children(recursive=True) if "worker_main" in " ".join(each.cmdline())]


def test_a_pattern_that_a_worker_cannot_import(make) -> None:
    from vllm_teach.attention.patterns import Causal

    class Mine(Causal): ...

    with pytest.raises(InvalidArgumentError, match="cannot be sent to a process"):
        make(attention_pattern=Mine())


def test_an_llm_that_was_closed_says_so(make) -> None:
    llm = make()
    pid = worker(llm)
    llm.close()
    llm.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineDeadError, match="this LLM was closed: load the model again"):
        generate(llm)


def test_an_llm_that_nobody_has_takes_its_worker_along() -> None:
    llm = LLM("tiny", tensor_parallel_size=2, **ARGUMENTS)
    pid = worker(llm)
    del llm
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_the_callers_threads_come_back(way: str) -> None:
    torch.set_num_threads(2)
    llm = LLM("tiny", tensor_parallel_size=2, **ARGUMENTS)
    assert torch.get_num_threads() == 1
    if way == "closed":
        llm.close()
    del llm
    gc.collect()
    assert torch.get_num_threads() == 2


SCRIPT = textwrap.dedent(
    f"""
    import sys, time
    from vllm_teach import LLM, SamplingParams
    llm = LLM("tiny", tensor_parallel_size=2, **{ARGUMENTS!r})
    ids = llm.generate([{PROMPT!r}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    print(ids[0].outputs[0].token_ids, flush=True)
    """
)


@pytest.mark.parametrize("way", ["-c", "stdin", "file"])
def test_it_starts_from_anywhere_and_leaves_nothing(way: str, tmp_path: Path) -> None:
    """`python -c`, standard input, as a notebook's cells, and a script without a guard, which spawn would run again."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    what = {"-c": ["-c", SCRIPT], "stdin": ["-"], "file": [str(file)]}[way]
    done = subprocess.run(
        [sys.executable, *what],
        input=SCRIPT if way == "stdin" else None,
        text=True,
        capture_output=True,
        timeout=120,
        cwd=tmp_path,
    )
    expected = LLM("tiny", **ARGUMENTS)
    assert done.stdout == f"{generate(expected)}\n", done.stderr
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_workers_end_with_a_driver_that_is_killed(number: int) -> None:
    script = (
        SCRIPT
        + "print(*llm.engine.ranks.processes.pids, flush=True)\nwhile True: llm.generate([[1]], use_tqdm=False)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        driver.stdout.readline()
        pid = int(driver.stdout.readline())
        time.sleep(0.2)
        driver.send_signal(number)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
