"""A server that is watched, and started again when it goes down."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_teach.engine.field_checks import check_number, check_whole
from vllm_teach.errors import ReplicaError
from vllm_teach.serving.replicas.child_process import ChildProcess, describe_end, last_line
from vllm_teach.serving.replicas.server_health import Health


@dataclass(frozen=True)
class RestartLimits:
    """When a server counts as down, and how often it is started again; times in seconds, checked on construction.

    It must be well within `start_timeout`, which covers the loading of a model. Then it is asked every
    `probe_interval`: one that is ill answers at once, so it has the fewest requests in flight and draws all the new
    ones. It is down when it has ended, says that it is ill, or has been silent for `silence`: a hang. Going down for
    the n-th time in a row, it starts again after `back_off` · 2ⁿ⁻¹, at most `longest_back_off`; one time more than
    `max_restarts` and it is given up. After being well for `settled` a new row begins.
    """

    start_timeout: float = 600.0
    probe_interval: float = 0.5
    silence: float = 60.0
    max_restarts: int = 5
    back_off: float = 1.0
    longest_back_off: float = 30.0
    settled: float = 60.0

    def __post_init__(self) -> None:
        hint = "use a number of seconds above 0"
        for name in ("start_timeout", "probe_interval", "silence", "back_off", "longest_back_off", "settled"):
            check_number(name, getattr(self, name), 0, open_low=True, hint=hint)
        check_whole("max_restarts", self.max_restarts, 0)

    def pause(self, times_down: int) -> float:
        """Return the seconds to wait before the next start."""
        doubled = min(times_down - 1, 64)  # beyond, a float overflows
        return min(self.back_off * 2.0**doubled, self.longest_back_off)


class SupervisedProcess:
    """One server: `command`, its output in the file `log`, asked for its health by `probe`.

    `name` begins what `report` is told. `stop_signal` makes the server finish what it has begun and end. Where
    `probes_on` is False it is asked only until it is well for the first time; later nothing but its end counts.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        probe: Callable[[], Awaitable[Health]],
        limits: RestartLimits,
        report: Callable[[str], None],
        *,
        environment: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        probes_on: bool = True,
    ) -> None:
        self.name, self.log = name, log
        self.child: ChildProcess | None = None
        self.times_down = 0  # in a row
        self._command, self._probe, self._limits, self._report = command, probe, limits, report
        self._environment, self._stop_signal, self._probes_on = environment, stop_signal, probes_on
        self._well_since: float | None = None

    async def start(self) -> None:
        """Start the command and wait until it is well; raises ReplicaError when that fails, and leaves it ended."""
        self._well_since = None
        child = self.child = ChildProcess(self._command, self.log, self._environment, self._stop_signal)
        try:
            async with asyncio.timeout(self._limits.start_timeout):
                while await self._probe() is not Health.WELL:
                    if await child.ends_within(min(0.1, self._limits.probe_interval)):
                        raise ReplicaError(f"{self.name} {await self._last_words(child)} before it served.")
        except TimeoutError:
            await self._end(child)
            raise ReplicaError(
                f"{self.name} did not serve within start_timeout={self._limits.start_timeout:g} s: "
                f"see its log, {self.log}, or give it longer."
            ) from None
        self._well_since = asyncio.get_running_loop().time()

    async def keep_running(self) -> None:
        """Watch the server that was started, and start it again when it goes down.

        Never returns: raises ReplicaError when it has gone down too often in a row.
        """
        while True:
            try:
                if self._well_since is None:
                    await self.start()
                    self._report(f"{self.name} serves again.")
                await self._watch()
            except ReplicaError as error:
                self._count_down()
                what = str(error).removesuffix(".")
                if self.times_down > self._limits.max_restarts:
                    raise ReplicaError(
                        f"{what}; after max_restarts={self._limits.max_restarts} it is given up."
                    ) from error
                pause = self._limits.pause(self.times_down)
                self._report(f"{what}; it is started again in {pause:g} s.")
                await asyncio.sleep(pause)

    async def stop(self, seconds: float) -> None:
        """Ask the server to finish and wait until it has ended; after so many seconds it is killed."""
        if self.child is None:
            return
        self.child.send(self._stop_signal)
        if not await self.child.ends_within(seconds):
            self._report(f"{self.name} has not ended {seconds:g} s after {self._stop_signal.name} and is killed.")
            self.child.kill()
        await self.child.wait()

    def kill(self) -> None:
        """End the server at once."""
        if self.child is not None:
            self.child.kill()

    async def _watch(self) -> None:
        """Raise ReplicaError, which says why, as soon as the server is down; nothing of it is left then."""
        assert self.child is not None
        clock = asyncio.get_running_loop().time
        answered, silent = clock(), 0
        if not self._probes_on:
            await self.child.wait()
        while not await self.child.ends_within(self._limits.probe_interval):
            health = await self._probe()
            if health is not Health.SILENT:
                answered = clock()
            # Counted, too: where this process was held up, all the time may have passed in one probe.
            silent = silent + 1 if health is Health.SILENT else 0
            if health is Health.ILL:
                await self._end(self.child)
                raise ReplicaError(f"{self.name} says that it does not work (log: {self.log}).")
            if silent >= 3 and clock() - answered > self._limits.silence:
                await self._end(self.child)
                raise ReplicaError(f"{self.name} has been silent for {self._limits.silence:g} s (log: {self.log}).")
        raise ReplicaError(f"{self.name} {await self._last_words(self.child)}.")

    def _count_down(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._well_since is not None and now - self._well_since >= self._limits.settled:
            self.times_down = 0
        self.times_down += 1
        self._well_since = None

    async def _end(self, child: ChildProcess) -> None:
        """End a server that may no longer be able to end by itself, with a moment to say goodbye to its clients."""
        child.send(self._stop_signal)
        if not await child.ends_within(2.0):
            child.kill()
        await child.wait()

    async def _last_words(self, child: ChildProcess) -> str:
        status = await child.wait()
        # Who was ended by a signal had no time to say why; the last line is another one's then.
        said = f"; its last line: {last_line(self.log):.200}" if status > 0 else ""
        return f"{describe_end(status)} (log: {self.log}{said})"
