"""A service as a first article writes it: the model is called inside the handler, one request after the other.

It speaks as much of OpenAI's protocol as the load client needs, so that the same load can be put on it and on the
package's server. It is the baseline of a lesson and no way to serve.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI

from vllm_teach.errors import EngineDeadError
from vllm_teach.serving.http.server import address_of, bind

Generate = Callable[[list[int], int], str]


def naive_app(generate: Generate, name: str = "naive") -> FastAPI:
    """Return the app: `generate(prompt_token_ids, max_tokens)` returns the text, and blocks until it is done."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> dict[str, Any]:
        # What is wrong here, on purpose: nothing else happens in this event loop until the answer is complete.
        text = generate(body["prompt"], body["max_tokens"])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        return {"choices": [{"text": text, "finish_reason": "length"}], "usage": usage}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": name}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


class NaiveService:
    """Runs `naive_app` on a free port of loopback, in a thread, until `close` or the end of a `with` block.

    What `generate` raises becomes a status of 500 and is not printed. Raises EngineDeadError when it does not start.
    """

    def __init__(self, generate: Generate) -> None:
        sock = bind("127.0.0.1", 0)
        self.url = address_of(sock)
        self._server = uvicorn.Server(uvicorn.Config(naive_app(generate), log_level="critical", lifespan="off"))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([sock])), name="naive service", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise EngineDeadError(f"the service at {self.url} did not start: see what it printed.")
            time.sleep(0.01)

    def close(self) -> None:
        """Answer what is in flight, and end."""
        self._server.should_exit = True
        self._thread.join(60)

    def __enter__(self) -> NaiveService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
