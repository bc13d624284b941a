"""`vllm-teach serve --replicas N`: the group of replicas that a command line asks for."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_teach.errors import InvalidArgumentError, ReplicaError
from vllm_teach.serving.replicas.nginx import CONFIGURATION
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings
from vllm_teach.serving.replicas.replica_group import ReplicaCommand, ReplicaGroup, ReplicaSettings
from vllm_teach.serving.replicas.supervised_process import RestartLimits
from vllm_teach.serving.report import report


def serve_replicas(arguments: argparse.Namespace) -> None:
    """Serve by several replicas until SIGTERM or SIGINT, then finish what is in flight and return.

    A second signal ends everything at once. The end of the terminal, SIGHUP, is such a signal, unless it is ignored as
    under nohup. Configuration and logs go to `--run-folder`, or to a temporary folder, which is removed when nothing
    went wrong; either is locked meanwhile. To rotate the logs, truncate those of the replicas; move those of nginx, and
    send SIGUSR1 to the process that `nginx.pid` names. Raises InvalidArgumentError and ReplicaError (`ReplicaGroup`).
    """
    if sys.platform == "win32":
        raise ReplicaError("--replicas needs signals, which Windows lacks: start servers one by one, with --port.")
    settings = read_settings(arguments)
    with _folder(arguments.run_folder) as folder:
        run_until_signal(own_command(arguments), folder, settings)


def run_until_signal(command: ReplicaCommand, folder: Path, settings: ReplicaSettings) -> None:
    """Run a `ReplicaGroup` in this thread, the main one, until SIGTERM, SIGINT or SIGHUP."""

    async def run() -> None:
        group = ReplicaGroup(command, folder, settings, report)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, group.stop)
        await group.run()

    asyncio.run(run())


def own_command(arguments: argparse.Namespace) -> ReplicaCommand:
    """Return what runs one replica: this very command, with an address and a swap file of its own and no replicas."""
    command = [sys.executable, "-m", "vllm_teach.cli", *shlex.split(arguments.command_line)[1:]]

    def replica(index: int, port: int) -> list[str]:
        swap = [] if arguments.swap_file is None else ["--swap-file", f"{arguments.swap_file}-{index}"]
        return [*command, *swap, "--host", "127.0.0.1", "--port", str(port), "--replicas", "1"]

    return replica


def read_settings(arguments: argparse.Namespace) -> ReplicaSettings:
    """Return the settings that the arguments of `serve` state."""
    nginx = NginxSettings(
        policy=arguments.balance,
        workers=arguments.nginx_workers,
        max_fails=arguments.max_fails,
        fail_timeout=arguments.fail_timeout,
        header_timeout=arguments.header_timeout,
        body_timeout=arguments.body_timeout,
        read_timeout=arguments.read_timeout,
        max_body_bytes=arguments.max_body_bytes,
    )
    # Asked to end by someone else, a replica listens no more but has that long to finish: no hang.
    silence = max(RestartLimits.silence, arguments.drain_timeout + 10.0)
    restarts = RestartLimits(
        start_timeout=arguments.start_timeout, max_restarts=arguments.max_restarts, silence=silence
    )
    return ReplicaSettings(
        replicas=arguments.replicas,
        host=arguments.host,
        port=arguments.port,
        devices=tuple(arguments.replica_devices or ()),
        drain_timeout=arguments.drain_timeout,
        nginx=nginx,
        restarts=restarts,
    )


@contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    """Make the folder `named`, or a temporary one, which stays only when an error comes by and it has logs."""
    if named is None:
        folder = Path(tempfile.mkdtemp(prefix="vllm-teach-"))
        folder.chmod(0o711)  # started by root, nginx's workers are someone else, who has to reach what is in it
        try:
            with _locked(folder):
                yield folder
        except BaseException:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
            raise
        shutil.rmtree(folder)
        return
    try:
        named.mkdir(parents=True, exist_ok=True)
        (named / CONFIGURATION).touch()
    except OSError as error:
        raise InvalidArgumentError(
            f"--run-folder is {str(named)!r}, where nothing can be written ({error.strerror}): give another."
        ) from error
    with _locked(named):
        yield named.resolve()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others out: a second command, whose nginx would take this one's place, and who removes old temporary files.

    systemd-tmpfiles leaves alone what is in a locked folder. The lock ends with this process, however that ends.
    """
    import fcntl  # Windows has none

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidArgumentError(
                f"--run-folder is {str(folder)!r}, which another command holds ({error.strerror}): give each its own."
            ) from error
        yield
    finally:
        os.close(descriptor)
