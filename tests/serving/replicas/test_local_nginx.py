"""nginx before servers that run already."""

import asyncio
import os
import subprocess
import sys
import textwrap
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.request import urlopen

import pytest

from vllm_teach.errors import ReplicaError
from vllm_teach.serving.replicas import local_nginx
from vllm_teach.serving.replicas.nginx import find_nginx
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings


class SaysItsPort(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = str(self.server.server_port).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")
def test_requests_go_to_each_in_turn_and_nothing_is_left() -> None:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), SaysItsPort) for _ in range(2)]
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    ports = [server.server_port for server in servers]
    try:
        with local_nginx.LocalNginx(ports, NginxSettings("round_robin", workers=1)) as nginx:
            folder = nginx._folder
            answers = [int(urlopen(f"{nginx.url}/x", timeout=10).read()) for _ in range(6)]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    assert sorted(answers) == sorted(ports * 3)
    assert not os.path.exists(folder)
    nginx.close()


@pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells children of their parent's death")
def test_it_ends_with_a_kernel_that_is_killed(folder, until, alive) -> None:
    code = """
    import signal
    from vllm_teach.serving.replicas.local_nginx import LocalNginx
    nginx = LocalNginx([9001])
    print((nginx._folder / "nginx.pid").read_text(), flush=True)
    signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as kernel:
        assert kernel.stdout is not None
        pid = int(kernel.stdout.readline())
        kernel.kill()
    asyncio.run(until(lambda: not alive(pid)))


def test_without_nginx(monkeypatch) -> None:
    monkeypatch.setattr(local_nginx, "find_nginx", lambda: None)
    with pytest.raises(ReplicaError, match="nginx is not installed"):
        local_nginx.LocalNginx([9001])
