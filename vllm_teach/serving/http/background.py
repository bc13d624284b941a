"""A server in a thread of this process: for notebooks, which have an event loop of their own, and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from vllm_teach.engine.llm import LLM
from vllm_teach.errors import EngineDeadError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.async_engine.limits import ServingLimits
from vllm_teach.serving.http.draining_server import DrainingServer
from vllm_teach.serving.http.server import ServerSettings, address_of, bind, run, serve
from vllm_teach.serving.http.settings import AppSettings
from vllm_teach.serving.metrics.server_metrics import ServerMetrics

_PATIENCE = 60.0  # seconds


class BackgroundServer:
    """Serves `llm` on loopback, at a free port unless one is given, until `close` or the end of a `with` block.

    Two threads: one for the event loop of HTTP, one in which the engine steps. Others may use `llm` while it has no
    request. `url` is the address, without /v1. Raises what the engine or the server raises while it starts.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        limits: ServingLimits | None = None,
        app_settings: AppSettings | None = None,
        server_settings: ServerSettings | None = None,
        port: int = 0,
    ) -> None:
        app_settings = app_settings or AppSettings()
        name = (*app_settings.served_model_names, llm.name)[0]
        metrics = ServerMetrics(name)
        self._engine = AsyncLLMEngine.of(llm, limits, on_report=metrics.on_report, on_finished=metrics.on_finished)
        sock = bind("127.0.0.1", port)
        self.url = address_of(sock)
        self._server: DrainingServer | None = None
        self._failure: BaseException | None = None
        self._settled = threading.Event()

        async def work() -> None:
            await serve(self._engine, sock, app_settings, server_settings, metrics, on_serving=self._begin)

        self._thread = threading.Thread(target=self._run, args=(lambda: run(work()),), name="vllm-teach server")
        self._thread.daemon = True  # a notebook's kernel ends also where nobody closed it
        self._thread.start()
        self._settled.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def num_waiting(self) -> int:
        """Requests accepted, but not in a step yet, at this moment: `/metrics` says how it was after the last step."""
        return self._engine.num_waiting

    def close(self) -> None:
        """Let what is in flight finish, and end. Can be called twice. Raises EngineDeadError if it does not end."""
        if self._server is not None:
            self._server.end()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            raise EngineDeadError(f"the server at {self.url} has not ended within {_PATIENCE:g} s: restart the kernel.")

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, server: DrainingServer) -> None:
        self._server = server
        self._settled.set()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that started the server, if it still waits
            self._failure = error
        finally:
            self._settled.set()
