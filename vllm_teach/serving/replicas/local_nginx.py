"""The real nginx before servers that run already on this machine: for a notebook, where a replica group is too much."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from vllm_teach.errors import ReplicaError
from vllm_teach.serving.replicas.child_process import ChildProcess, last_line
from vllm_teach.serving.replicas.nginx import (
    CONFIGURATION,
    HOW_TO_INSTALL,
    check_configuration,
    find_nginx,
    nginx_command,
    nginx_listens,
)
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings, nginx_configuration
from vllm_teach.serving.replicas.reserved_port import ReservedPort

_PATIENCE = 30.0  # seconds, to start and to end


class LocalNginx:
    """Passes on what comes to `url`, on a free port of loopback, to the servers on `ports`, until `close`.

    Its files are in a temporary folder, which `close` removes. It ends, too, when the thread ends that has made it.
    Raises ReplicaError when nginx is not installed, refuses its configuration, or does not start.
    """

    def __init__(self, ports: Sequence[int], settings: NginxSettings | None = None) -> None:
        nginx = find_nginx()
        if nginx is None:
            raise ReplicaError(f"nginx is not installed: {HOW_TO_INSTALL}.")
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-teach-nginx-"))
        self._folder.chmod(0o711)  # nginx's workers are another user where root starts it
        self._port = ReservedPort("127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port.port}"
        self._child: ChildProcess | None = None
        try:
            text = nginx_configuration(settings or NginxSettings(), self._port.addresses, ports)
            (self._folder / CONFIGURATION).write_text(text, encoding="utf-8")
            check_configuration(nginx, self._folder)
            log = self._folder / "nginx.log"
            self._child = ChildProcess(nginx_command(nginx, self._folder), log)
            self._wait_until_it_listens(self._child, log)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End nginx at once, and remove its files. Can be called twice."""
        if self._child is not None:
            self._child.send(signal.SIGTERM)
            self._child.join(_PATIENCE)
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalNginx:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until_it_listens(self, child: ChildProcess, log: Path) -> None:
        end = time.monotonic() + _PATIENCE
        while not nginx_listens(self._folder, child.pid):
            if child.ended or time.monotonic() > end:
                raise ReplicaError(f"nginx does not start ({last_line(log):.200}): see that its port is free.")
            time.sleep(0.01)
