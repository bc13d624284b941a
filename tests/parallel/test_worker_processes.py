import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from vllm_teach.errors import EngineDeadError, InvalidArgumentError, ModelLoadError
from vllm_teach.parallel.worker_processes import WorkerProcesses


def start(entry: str, *arguments: tuple) -> WorkerProcesses:
    names = [f"worker {index}" for index in range(len(arguments))]
    return WorkerProcesses(entry, names, arguments, {})


def gone(pid: int) -> bool:
    """Wait for the end of a process that is not this one's child."""
    try:
        psutil.Process(pid).wait(20)
    except psutil.NoSuchProcess:
        return True
    return True


def stop(pid: int) -> None:
    """Stop a process, all of whose threads stop only a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def test_workers_are_ready_and_end_when_told(programs: str) -> None:
    workers = start(f"{programs}:wait", (), ())
    workers.wait_until_ready(60)
    assert workers.ended() is None
    children = [psutil.Process(pid) for pid in workers.pids]
    workers.stop()
    assert not any(child.is_running() for child in children)
    workers.stop()  # twice does no harm


def test_a_worker_that_is_never_ready_is_given_up(programs: str) -> None:
    workers = start(f"{programs}:never_ready", ())
    with pytest.raises(EngineDeadError, match=r"^worker 0 \(pid \d+\) was not ready in 0\.2 s: load"):
        workers.wait_until_ready(0.2)
    workers.stop()


def test_a_file_of_the_current_folder_does_not_stand_for_one_of_pythons(
    programs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('somebody else')")
    monkeypatch.chdir(tmp_path)
    workers = start(f"{programs}:wait", ())
    workers.wait_until_ready(60)
    workers.stop()


def test_workers_that_hang_are_ended_all_at_once(programs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has what is left of one grace, and not one of its own."""
    workers = start(f"{programs}:wait", (), (), ())
    workers.wait_until_ready(60)
    for pid in workers.pids:
        stop(pid)
    asked: list[float] = []
    wait = subprocess.Popen.wait

    def note(self: subprocess.Popen, timeout: float | None = None) -> int:
        asked.extend([] if timeout is None else [timeout])
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", note)
    workers.stop()
    assert asked[0] > 2.9
    assert max(asked[1:]) < 0.1
    assert not any(psutil.pid_exists(pid) for pid in workers.pids)


def test_workers_end_when_nobody_has_them(programs: str) -> None:
    workers = start(f"{programs}:wait", ())
    workers.wait_until_ready(60)
    (pid,) = workers.pids
    del workers
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("entry", ["wait", "never_ready"])
def test_workers_end_with_a_parent_that_is_killed(programs: str, entry: str) -> None:
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from vllm_teach.parallel.worker_processes import WorkerProcesses
        workers = WorkerProcesses("{programs}:{entry}", ["a", "b"], [(), ()], {{}})
        {"workers.wait_until_ready(60)" if entry == "wait" else ""}
        print(*workers.pids, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert all(gone(pid) for pid in pids)


def test_a_worker_that_is_stopped_is_ended_too(programs: str) -> None:
    workers = start(f"{programs}:wait", ())
    workers.wait_until_ready(60)
    (pid,) = workers.pids
    stop(pid)
    workers.stop()
    assert not psutil.pid_exists(pid)


def test_what_a_worker_prints_is_not_its_word(programs: str) -> None:
    workers = start(f"{programs}:chatter", (2000,))
    workers.wait_until_ready(60)
    workers.stop()


def test_a_typed_error_comes_back_as_itself(programs: str) -> None:
    workers = start(f"{programs}:refuse", ("the model is bad:\nuse another.",))
    with pytest.raises(ModelLoadError, match=r"^worker 0: the model is bad:\nuse another\.$"):
        workers.wait_until_ready(60)
    workers.stop()


def test_another_error_becomes_a_typed_one(programs: str) -> None:
    workers = start(f"{programs}:stumble", ())
    with pytest.raises(
        EngineDeadError, match=r"^worker 0: it could not start \(ZeroDivisionError\('by nothing'\)\)\.$"
    ):
        workers.wait_until_ready(60)
    workers.stop()


def test_a_death_before_it_is_ready_is_noticed(programs: str) -> None:
    workers = start(f"{programs}:die", (signal.SIGKILL,))
    with pytest.raises(EngineDeadError, match=r"^worker 0 \(pid \d+\) was killed by signal 9: load"):
        workers.wait_until_ready(60)
    workers.stop()


def test_a_death_later_is_noticed_and_told(programs: str, tmp_path: Path) -> None:
    workers = start(f"{programs}:die_later", (str(tmp_path / "never"),), (str(tmp_path / "now"),))
    workers.wait_until_ready(60)
    told = threading.Event()
    workers.when_one_ends(told.set)
    (tmp_path / "now").touch()
    assert told.wait(20)
    assert "worker 1 (pid " in str(workers.ended())
    assert "was killed by signal 9" in str(workers.ended())
    workers.stop()


def test_who_left_in_good_order_is_named_last(programs: str, tmp_path: Path) -> None:
    workers = start(f"{programs}:leave", ())
    workers.wait_until_ready(60)
    assert "ended with code 0" in str(workers.ended(wait=20))
    workers.stop()


def test_arguments_that_cannot_be_sent_are_refused(programs: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^arguments for .*:wait cannot be sent to a process \("):
        start(f"{programs}:wait", (lambda: None,))


def test_arguments_that_cannot_be_read_there_are_refused(programs: str) -> None:
    module = type(sys)("only_here")
    exec("class Mine: ...", module.__dict__)
    module.Mine.__module__ = "only_here"
    sys.modules["only_here"] = module
    try:
        workers = start(f"{programs}:wait", (module.Mine(),))
    finally:
        del sys.modules["only_here"]
    with pytest.raises(InvalidArgumentError, match=r"cannot be read here \(No module named 'only_here'\)"):
        workers.wait_until_ready(60)
    workers.stop()


def test_a_fork_does_not_end_its_parents_workers(programs: str) -> None:
    workers = start(f"{programs}:wait", ())
    workers.wait_until_ready(60)
    child = os.fork()
    if child == 0:
        workers.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert workers.ended() is None
    workers.stop()
