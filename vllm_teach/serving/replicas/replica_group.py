"""Several servers of one model, each a process with an engine of its own, and nginx before them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm_teach.engine.field_checks import check_number, check_whole, refuse
from vllm_teach.errors import ReplicaError
from vllm_teach.openmp import WAIT_SHORTLY, wait_shortly
from vllm_teach.serving.replicas.nginx import (
    CONFIGURATION,
    HOW_TO_INSTALL,
    PID_FILE,
    check_configuration,
    find_nginx,
    nginx_command,
    nginx_listens,
)
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings, nginx_configuration
from vllm_teach.serving.replicas.prometheus_files import write_prometheus_files
from vllm_teach.serving.replicas.reserved_port import ReservedPort
from vllm_teach.serving.replicas.server_health import Health, ask_health
from vllm_teach.serving.replicas.supervised_process import RestartLimits, SupervisedProcess

# Seconds in which servers that have nothing in flight end: then there is nothing to say of it.
_QUICK_END = 1.0

ReplicaCommand = Callable[[int, int], Sequence[str]]  # from a replica's number and its port to what serves on it


@dataclass(frozen=True)
class ReplicaSettings:
    """How many replicas stand behind `host` and `port` (0: a free one); checked on construction.

    `devices` are one replica's CUDA_VISIBLE_DEVICES each; without them all see the same. Told to stop, the group has
    `drain_timeout` seconds to finish what is in flight.
    """

    replicas: int = 2
    host: str = "127.0.0.1"
    port: int = 8000
    devices: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    nginx: NginxSettings = field(default_factory=NginxSettings)
    restarts: RestartLimits = field(default_factory=RestartLimits)

    def __post_init__(self) -> None:
        check_whole("replicas", self.replicas, 1)
        check_whole("port", self.port, 0, 65535, hint="use a whole number from 0 to 65535")
        check_number("drain_timeout", self.drain_timeout, 0, hint="use a number of seconds from 0")
        if self.devices and len(self.devices) != self.replicas:
            refuse("devices", self.devices, f"give one for each of the {self.replicas} replicas, or none")


class ReplicaGroup:
    """Starts the replicas and nginx, keeps them running, and stops them in order.

    `command` gives what runs a replica on a port of 127.0.0.1; that answers `GET /health`, and after SIGTERM finishes
    what it had begun and ends. Each has its share of the cores, by OpenMP's variables, unless these are set here.
    Configuration and logs are written to `folder`. `report` is told, a sentence each time, what went down, what is done
    about it, and what its end waits for. Where nginx is not installed, the replicas serve on their ports.

    Raises InvalidArgumentError when the port cannot be served on, ReplicaError when nginx refuses its configuration.
    """

    def __init__(
        self, command: ReplicaCommand, folder: Path, settings: ReplicaSettings, report: Callable[[str], None]
    ) -> None:
        self.folder, self.settings, self._report = folder, settings, report
        self._stopping, self._served = asyncio.Event(), False
        with ExitStack() as ports:
            self._public = ports.enter_context(closing(ReservedPort(settings.host, settings.port)))
            self._reserved = [ports.enter_context(closing(ReservedPort("127.0.0.1"))) for _ in range(settings.replicas)]
            self.replicas = [self._replica(index, command) for index in range(settings.replicas)]
            self.nginx = self._prepare_nginx()
            self._ports = ports.pop_all()

    @property
    def addresses(self) -> list[str]:
        """The replicas' own addresses, as in nginx's log."""
        return [f"127.0.0.1:{each.port}" for each in self._reserved]

    @property
    def url(self) -> str:
        """Where nginx serves."""
        host, port = self._public.addresses[0]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self) -> None:
        """Serve until `stop` is called, then finish what is in flight.

        Raises ReplicaError when a replica cannot be started at first, and when later none is left, or no nginx.
        """
        serving, stopping = asyncio.ensure_future(self._serve()), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await self._stop_all()
            self._ports.close()

    def stop(self) -> None:
        """Make `run` finish and return; called again, it ends everything at once."""
        if self._stopping.is_set():
            self._report("what is in flight is ended at once.")
            for each in (self.nginx, *self.replicas):
                if each is not None:
                    each.kill()
        self._stopping.set()

    async def _serve(self) -> None:
        await _all_of([replica.start() for replica in self.replicas])
        if self.nginx is None:
            self._served = True
            self._report(
                f"nginx is not installed, so each replica is served on its own address: {', '.join(self.addresses)}; "
                f"to have them on one, {HOW_TO_INSTALL}; its configuration is {self.folder / CONFIGURATION}."
            )
            await self._keep_replicas()
            return
        await self.nginx.start()
        self._served = True
        openmp = " ".join(f"{name}={value}" for name, value in _openmp(self.settings.replicas).items())
        self._report(
            f"{len(self.replicas)} replicas ({', '.join(self.addresses)}) are served on {self.url} by nginx; "
            f"configuration and logs are in {self.folder}; each replica has {openmp}."
        )
        await _all_of([self.nginx.keep_running(), self._keep_replicas()])

    async def _keep_replicas(self) -> None:
        """Keep each running as long as that goes; raises ReplicaError when the last one is given up."""

        async def keep(replica: SupervisedProcess) -> None:
            try:
                await replica.keep_running()
            except ReplicaError as error:
                self._report(str(error))

        await _all_of([keep(replica) for replica in self.replicas])
        raise ReplicaError(f"no replica is left: see the logs in {self.folder}.")

    async def _stop_all(self) -> None:
        """Stop nginx first, which takes nothing new and ends with its last answer; then the replicas, idle by now."""
        seconds = self.settings.drain_timeout
        waiting = f"finishing what is in flight (at most {seconds:g} s); Ctrl-C or SIGTERM again ends it at once."
        with ExitStack() as in_flight:
            if self._served:
                reminder = asyncio.get_running_loop().call_later(_QUICK_END, self._report, waiting)
                in_flight.callback(reminder.cancel)
            # Each ends by itself when its time is over, and then has some seconds to do so.
            if self.nginx is not None:
                await self.nginx.stop(seconds + 5.0)
                in_flight.close()
            await asyncio.gather(*(replica.stop(seconds + 15.0) for replica in self.replicas))

    def _replica(self, index: int, command: ReplicaCommand) -> SupervisedProcess:
        port = self._reserved[index].port
        return SupervisedProcess(
            f"replica {index} (127.0.0.1:{port})",
            command(index, port),
            self.folder / f"replica-{index}.log",
            partial(ask_health, port, min(10.0, self.settings.restarts.silence)),
            self.settings.restarts,
            self._report,
            environment=self._environment(index),
        )

    def _environment(self, index: int) -> dict[str, str]:
        """Return a replica's environment: its share of the cores, and of the devices where they are given."""
        environment = {**os.environ, **_openmp(self.settings.replicas)}
        if self.settings.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.settings.devices[index]
        return environment

    def _prepare_nginx(self) -> SupervisedProcess | None:
        """Write what nginx and Prometheus are to read; return nginx, not started yet, or None where there is none."""
        ports = [each.port for each in self._reserved]
        text = nginx_configuration(self.settings.nginx, self._public.addresses, ports, self.settings.drain_timeout)
        (self.folder / CONFIGURATION).write_text(text, encoding="utf-8")
        write_prometheus_files(self.folder, self.addresses)
        # In a container that is started anew with its folders kept, processes often get the numbers that they had.
        (self.folder / PID_FILE).unlink(missing_ok=True)
        nginx = find_nginx()
        if nginx is None:
            return None
        check_configuration(nginx, self.folder)
        return SupervisedProcess(
            f"nginx ({self.url})",
            nginx_command(nginx, self.folder),
            self.folder / "nginx.log",
            self._probe_nginx,
            self.settings.restarts,
            self._report,
            stop_signal=signal.SIGQUIT,
            probes_on=False,  # it does not hang; and when it is too busy to answer, all streams would end with it
        )

    async def _probe_nginx(self) -> Health:
        assert self.nginx is not None
        assert self.nginx.child is not None
        return Health.WELL if nginx_listens(self.folder, self.nginx.child.pid) else Health.SILENT


async def _all_of(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them all; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _openmp(replicas: int) -> dict[str, str]:
    """Return OpenMP's variables for one of so many replicas: what is set here, or else a share of the cores.

    Replicas that each compute with all cores wait for each other.
    """
    share = os.environ.get("OMP_NUM_THREADS", str(max(1, _usable_cores() // replicas)))
    waiting = {**os.environ, **wait_shortly(os.environ)}
    return {"OMP_NUM_THREADS": share, **{name: waiting[name] for name in WAIT_SHORTLY if name in waiting}}


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
