"""A child process: its end and its group's, signals, orphans, zombies."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_teach.errors import ReplicaError
from vllm_teach.serving.replicas.child_process import ChildProcess, describe_end

linux = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells children of their parent's death")

# Starts a grandchild, writes its number, and stays.
PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "300"])
print(child.pid, flush=True)
child.wait()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def numbers(log: Path) -> list[int]:
    return [int(word) for word in log.read_text().split()] if log.exists() else []


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(7)", 7)])
def test_the_exit_status_comes_to_all_who_wait(tmp_path, code, status):
    async def test() -> None:
        child = ChildProcess(python(code), tmp_path / "log")
        assert await asyncio.gather(*(child.wait() for _ in range(3))) == [status] * 3
        assert await child.ends_within(0)
        child.kill()  # nobody is there any more: nothing happens
        assert await child.wait() == status

    asyncio.run(test())


def test_what_it_prints_is_appended_to_the_log(tmp_path):
    async def test() -> None:
        for word in ("one", "two"):
            code = f"import sys; print({word!r}); print('error', file=sys.stderr)"
            await ChildProcess(python(code), tmp_path / "log").wait()

    asyncio.run(test())
    assert sorted((tmp_path / "log").read_text().split()) == ["error", "error", "one", "two"]


def test_a_wait_that_is_cancelled_leaves_the_child_alone(tmp_path, alive):
    async def test() -> None:
        child = ChildProcess(["sleep", "300"], tmp_path / "log")
        assert not await child.ends_within(0.01)
        assert alive(child.pid)
        child.send(signal.SIGTERM)
        assert await child.wait() == -signal.SIGTERM

    asyncio.run(test())


def test_who_waits_can_be_cancelled_in_the_very_moment_of_the_end(tmp_path):
    """A supervisor that is told to stop while a replica dies would watch on for ever."""

    async def cancel_after(steps: int) -> bool:
        child = ChildProcess(["sleep", "300"], tmp_path / "log")
        waiting = asyncio.ensure_future(child.ends_within(60.0))
        await asyncio.sleep(0.01)
        child.kill()
        child.join(30.0)  # the loop has not heard of it yet
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled = waiting.cancel()
        [result] = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError) == cancelled
        return cancelled

    cancelled = [asyncio.run(cancel_after(steps)) for steps in range(12)]
    assert (cancelled[0], cancelled[-1]) == (True, False)


def test_looking_whether_it_has_ended_leaves_nothing_behind(tmp_path):
    def futures() -> int:
        gc.collect()
        return sum(issubclass(type(each), asyncio.Future) for each in gc.get_objects())

    async def test() -> None:
        child = ChildProcess(["sleep", "300"], tmp_path / "log")
        assert not await child.ends_within(0.001)
        before = futures()
        for _ in range(50):  # a supervisor looks twice a second, for months
            assert not await child.ends_within(0.001)
        assert futures() - before < 5
        child.kill()
        assert await child.wait() == -signal.SIGKILL

    asyncio.run(test())


def test_without_an_event_loop_one_can_wait_too(tmp_path):
    child = ChildProcess(["sleep", "300"], tmp_path / "log")
    with pytest.raises(TimeoutError):
        child.join(0.01)
    assert not child.ended
    child.kill()
    assert child.join(30) == -signal.SIGKILL
    assert child.ended


def test_it_has_a_group_of_its_own_which_ends_with_it(tmp_path, until, alive):
    async def test() -> None:
        child = ChildProcess(python(PARENT), tmp_path / "log")
        [grandchild] = await until(lambda: numbers(tmp_path / "log"))
        assert os.getpgid(grandchild) == child.pid != os.getpgrp()
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        await until(lambda: not alive(grandchild))

    asyncio.run(test())


def test_a_command_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ReplicaError, match="/no/such/program cannot be started"):
        ChildProcess(["/no/such/program"], tmp_path / "log")


@linux
def test_when_this_process_is_killed_the_child_gets_its_signal(tmp_path, until, alive):
    code = f"""
    import os, signal
    from pathlib import Path
    from vllm_teach.serving.replicas.child_process import ChildProcess

    saying = "import signal, sys, time\\nfor number in (signal.SIGTERM, signal.SIGQUIT):\\n" \\
        "    signal.signal(number, lambda number, frame: sys.exit(print('got', number, flush=True)))\\n" \\
        "print('ready', flush=True)\\ntime.sleep(300)"
    children = [
        ChildProcess(["{sys.executable}", "-c", saying], Path("{tmp_path}/a")),
        ChildProcess(["{sys.executable}", "-c", saying], Path("{tmp_path}/b"), orphan_signal=signal.SIGQUIT),
    ]
    print(*(child.pid for child in children), flush=True)
    signal.pause()
    """
    logs = [tmp_path / "a", tmp_path / "b"]
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    asyncio.run(until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs)))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(until(lambda: not any(alive(child) for child in children)))
    said = [log.read_text().split()[-1] for log in logs]
    assert said == [str(int(signal.SIGTERM)), str(int(signal.SIGQUIT))]


@linux
def test_orphans_that_fall_to_this_process_are_reaped(tmp_path):
    """As PID 1 of a container it inherits them; a subreaper does, too."""
    code = f"""
    import asyncio, ctypes
    from pathlib import Path
    from vllm_teach.serving.replicas.child_process import ChildProcess

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    async def main():
        log = Path("{tmp_path}/log")
        child = ChildProcess(["{sys.executable}", "-c", {PARENT!r}], log)
        while not (log.exists() and log.read_text().strip()):
            await asyncio.sleep(0.02)
        child.kill()
        await child.wait()
        state = Path(f"/proc/{{log.read_text().strip()}}")
        print("left" if state.exists() else "reaped")

    asyncio.run(main())
    """
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("reaped", "")


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with status 0"), (3, "ended with status 3"), (-9, "was ended by SIGKILL"), (-40, "by signal 40")],
)
def test_an_end_in_words(status, words):
    assert describe_end(status).endswith(words)
