"""The real nginx before servers that run already on this machine: for a notebook, where a replica group is too much."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from vllm_teach.errors import ReplicaError
from vllm_teach.serving.replicas.nginx import (
    CONFIGURATION,
    HOW_TO_INSTALL,
    check_configuration,
    find_nginx,
    nginx_command,
)
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings, nginx_configuration
from vllm_teach.serving.replicas.reserved_port import ReservedPort


class LocalNginx:
    """Passes on what comes to `url`, on a free port of loopback, to the servers on `ports`, until `close`.

    Its files are in a temporary folder, which `close` removes. Raises ReplicaError when nginx is not installed, refuses
    its configuration, or does not start.
    """

    def __init__(self, ports: Sequence[int], settings: NginxSettings | None = None) -> None:
        nginx = find_nginx()
        if nginx is None:
            raise ReplicaError(f"nginx is not installed: {HOW_TO_INSTALL}.")
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-teach-nginx-"))
        self._folder.chmod(0o711)  # nginx's workers are another user where root starts it
        port = ReservedPort("127.0.0.1")
        self.url = f"http://127.0.0.1:{port.port}"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            text = nginx_configuration(settings or NginxSettings(), port.addresses, ports)
            (self._folder / CONFIGURATION).write_text(text, encoding="utf-8")
            check_configuration(nginx, self._folder)
            port.close()
            with (self._folder / "output.log").open("wb") as output:
                self._process = subprocess.Popen(
                    nginx_command(nginx, self._folder), stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            self._wait_until_it_listens(port.port)
        except BaseException:
            port.close()
            self.close()
            raise

    def close(self) -> None:
        """End nginx at once, and remove its files. Can be called twice."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalNginx:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until_it_listens(self, port: int, seconds: float = 10.0) -> None:
        assert self._process is not None
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if self._process.poll() is not None or time.monotonic() > end:
                said = (self._folder / "output.log").read_text(errors="replace").strip()
                raise ReplicaError(f"nginx does not start ({said:.200}): see that its port is free.")
            time.sleep(0.01)
