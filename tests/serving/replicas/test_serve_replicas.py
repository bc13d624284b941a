"""The command that serves by replicas, as a process: signals, its own death, what it writes where."""

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from vllm_teach.cli import build_parser
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.replicas import serve_replicas as replicas
from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings
from vllm_teach.serving.replicas.replica_group import ReplicaSettings

FAKE = Path(__file__).with_name("fake_replica.py")
needs_nginx = pytest.mark.skipif(find_nginx() is None, reason=HOW_TO_INSTALL)


class Command:
    """A running supervisor of two fake replicas, its address and its processes."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        assert process.stderr is not None
        self.process = process
        self.said = process.stderr.readline()
        self.url = self.said.partition("served on ")[2].partition(" ")[0]
        self.port = int(self.url.rpartition(":")[2])
        ports = self.said.partition("(")[2].partition(")")[0].split(", ")
        self.replicas = [f"http://{port}" for port in ports]
        self.pids: list[int] = []

    async def all_up(self) -> None:
        """nginx listens before its last worker is there."""
        async with asyncio.timeout(30):
            while len(self.pids) < 5:  # two replicas, nginx, and two workers of it
                await asyncio.sleep(0.02)
                self.pids = descendants(self.process.pid)

    async def stream(self, client: aiohttp.ClientSession) -> aiohttp.ClientResponse:
        response = await client.post(f"{self.url}/stream")
        assert await response.content.readline() == b"first\n"
        return response


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@contextmanager
def running(folder: Path, hangup: str = "SIG_DFL", quick_end: float = 0.05) -> Iterator[Command]:
    """The command in a process that is started with this handler of SIGHUP, whatever the tests were started with.

    An end of more than `quick_end` seconds is told what it waits for.
    """
    code = f"""
    import signal, sys
    from pathlib import Path
    from vllm_teach.serving.replicas import replica_group
    from vllm_teach.serving.replicas.replica_group import ReplicaSettings
    from vllm_teach.serving.replicas.serve_replicas import run_until_signal

    replica_group._QUICK_END = {quick_end}
    signal.signal(signal.SIGHUP, signal.{hangup})
    command = lambda index, port: [sys.executable, "{FAKE}", "--port", str(port)]
    run_until_signal(command, Path("{folder}"), ReplicaSettings(port=0, drain_timeout=30.0))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True)
    try:
        yield Command(process, folder)
    finally:
        process.terminate()
        process.wait(60)
        assert process.stderr is not None
        process.stderr.close()


def refuses(port: int) -> bool:
    with suppress(ConnectionResetError):  # connected in the very moment in which nginx lets the port go
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
    return False


@needs_nginx
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_told_to_stop_it_takes_nothing_new_and_finishes_what_it_has(folder, until, alive, number):
    async def test(command: Command) -> None:
        await command.all_up()
        async with aiohttp.ClientSession() as client:
            streams = [await command.stream(client) for _ in range(6)]
            command.process.send_signal(number)
            await until(lambda: refuses(command.port))
            waiting = await asyncio.to_thread(command.process.stderr.readline)
            assert waiting.startswith("vllm-teach: finishing what is in flight (at most 30 s); Ctrl-C or SIGTERM again")
            for replica in command.replicas:  # they still work on what they have
                async with client.post(f"{replica}/release") as response:
                    assert response.status == 200
            assert [await stream.text() for stream in streams] == ["last\n"] * 6
        await until(lambda: command.process.poll() is not None)

    with running(folder) as command:
        asyncio.run(test(command))
        assert command.process.returncode == 0
        assert not any(alive(pid) for pid in command.pids)


@needs_nginx
def test_under_nohup_the_end_of_the_terminal_changes_nothing(folder):
    async def test(command: Command) -> None:
        await command.all_up()
        async with aiohttp.ClientSession() as client:
            command.process.send_signal(signal.SIGHUP)
            for _ in range(20):
                async with client.post(f"{command.url}/short") as response:
                    assert response.status == 200
        assert command.process.poll() is None

    with running(folder, "SIG_IGN") as command:
        asyncio.run(test(command))


@needs_nginx
def test_told_twice_it_ends_at_once(folder, until, alive):
    async def test(command: Command) -> None:
        await command.all_up()
        async with aiohttp.ClientSession() as client:
            stream = await command.stream(client)
            command.process.terminate()
            await until(lambda: refuses(command.port))
            command.process.terminate()
            with pytest.raises(aiohttp.ClientError):
                await stream.text()  # nobody releases it
            await until(lambda: command.process.poll() is not None)
        assert "vllm-teach: what is in flight is ended at once.\n" in command.process.stderr.readlines()

    with running(folder) as command:
        asyncio.run(test(command))
        assert command.process.returncode == 0
        assert not any(alive(pid) for pid in command.pids)


@needs_nginx
def test_told_to_stop_while_nothing_is_in_flight_it_says_nothing(folder):
    with running(folder, quick_end=20.0) as command:
        asyncio.run(command.all_up())
        command.process.terminate()
        assert command.process.stderr.read() == ""


@needs_nginx
@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells children of their parent's death")
def test_killed_it_leaves_nobody_behind(folder, until, alive):
    with running(folder) as command:
        asyncio.run(command.all_up())
        command.process.kill()
        asyncio.run(until(lambda: not any(alive(pid) for pid in command.pids)))


def parse(*more: str) -> argparse.Namespace:
    arguments = build_parser().parse_args(["serve", "--replicas", "3", *more])
    arguments.command_line = "vllm-teach serve"
    return arguments


def test_the_defaults_of_flags_are_those_of_the_settings():
    """Size and time of a body apart, which are as a server alone has them."""
    settings = replicas.read_settings(parse())
    of_servers = {"max_body_bytes": settings.nginx.max_body_bytes, "body_timeout": settings.nginx.body_timeout}
    assert settings == ReplicaSettings(3, nginx=NginxSettings(**of_servers))


def test_flags_become_settings():
    devices = ["--replica-devices", "0,1", "2", "3"]
    settings = replicas.read_settings(
        parse("--balance", "round_robin", *devices, "--drain-timeout", "300", "--max-body-bytes", "1000")
    )
    assert (settings.replicas, settings.devices) == (3, ("0,1", "2", "3"))
    assert settings.nginx.policy == "round_robin"
    assert settings.nginx.max_body_bytes == 1000
    assert settings.drain_timeout == 300
    assert settings.restarts.silence > 300, "a replica that drains is silent, and does not hang"


@pytest.mark.parametrize(("flag", "named"), [("--read-timeout", "read_timeout="), ("--max-restarts", "max_restarts=")])
def test_a_bad_flag_is_named(flag, named):
    with pytest.raises(InvalidArgumentError, match=named):
        replicas.read_settings(parse(flag, "-1"))


def test_a_replica_runs_the_same_command_on_a_port_of_its_own():
    line = "vllm-teach serve --model 'a b' --replicas 4 --host 0.0.0.0 --port 80"
    command = replicas.own_command(argparse.Namespace(command_line=line, swap_file=None))(0, 9001)
    assert command[:3] == [sys.executable, "-m", "vllm_teach.cli"]
    assert command[3:6] == ["serve", "--model", "a b"]
    assert command[-6:] == ["--host", "127.0.0.1", "--port", "9001", "--replicas", "1"], "the last one counts"
    swapping = replicas.own_command(argparse.Namespace(command_line=line, swap_file="/a b"))
    assert [swapping(index, 9001)[-8:-6] for index in (0, 1)] == [["--swap-file", "/a b-0"], ["--swap-file", "/a b-1"]]


@pytest.mark.parametrize("given", [True, False])
def test_the_temporary_folder_goes_when_all_went_well_and_a_given_one_stays(tmp_path, monkeypatch, given):
    seen: list[Path] = []
    monkeypatch.setattr(replicas, "run_until_signal", lambda command, folder, settings: seen.append(folder))
    arguments = parse(*(["--run-folder", str(tmp_path / "a" / "b")] if given else []))
    replicas.serve_replicas(arguments)
    assert seen[0].exists() == given


@pytest.mark.parametrize("log", [True, False])
def test_the_logs_stay_when_something_went_wrong_and_an_empty_folder_does_not(monkeypatch, tmp_path, log):
    def fail(command: object, folder: Path, settings: object) -> None:
        seen.append(folder)
        if log:
            (folder / "replica-0.log").touch()
        raise InvalidArgumentError("it went wrong.")

    seen: list[Path] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(replicas.tempfile, "tempdir", None)
    monkeypatch.setattr(replicas, "run_until_signal", fail)
    arguments = parse()
    with pytest.raises(InvalidArgumentError):
        replicas.serve_replicas(arguments)
    assert seen[0].exists() == log


@pytest.mark.parametrize("given", [True, False])
def test_a_run_folder_belongs_to_one_command(tmp_path, monkeypatch, given):
    """Also the temporary one, which who removes old files leaves alone because of that."""

    def serve_too(command: object, folder: Path, settings: object) -> None:
        second = parse("--run-folder", str(folder))
        monkeypatch.setattr(replicas, "run_until_signal", lambda *_: pytest.fail("both serve"))
        with pytest.raises(InvalidArgumentError, match=f"--run-folder is '{folder}', which another command holds"):
            replicas.serve_replicas(second)
        done.append(folder)

    done: list[Path] = []
    monkeypatch.setattr(replicas, "run_until_signal", serve_too)
    first = parse(*(["--run-folder", str(tmp_path)] if given else []))
    replicas.serve_replicas(first)
    assert len(done) == 1


def test_a_run_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    arguments = parse("--run-folder", str(tmp_path / "file" / "folder"))
    with pytest.raises(InvalidArgumentError, match="--run-folder"):
        replicas.serve_replicas(arguments)
