"""The HTTP app around an engine: OpenAI's protocol, vLLM's additions to it, and the articles' `/generate`.

| route                               | what it does                                            |
|-------------------------------------|---------------------------------------------------------|
| `POST /v1/completions`              | continue prompts                                        |
| `POST /v1/chat/completions`         | answer a conversation                                   |
| `POST /generate`                    | continue a prompt, in the short form                    |
| `POST /tokenize`, `POST /detokenize`| text to tokens and back                                 |
| `GET /v1/models`, `/v1/models/{id}` | the model's names                                       |
| `GET /health`                       | 200 while the engine is well, else 503                  |
| `GET /metrics`                      | for Prometheus                                          |
| `GET /version`, `/openapi.json`     | this software's version, and the description of all this|

What takes GET takes HEAD, too. Every error is OpenAI's object (`http_errors`), also for a path that there is not. There
is no `/docs`: its pages would come from somebody else's server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from vllm_teach.engine.failure import shown
from vllm_teach.errors import VllmTeachError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.http import chat, completions, generate_route, status_routes, tokenize_routes
from vllm_teach.serving.http.api_key import ApiKeyGuard
from vllm_teach.serving.http.body_limit import BodyLimit
from vllm_teach.serving.http.http_errors import ApiError, ErrorResponse, describe_error, describe_validation
from vllm_teach.serving.http.http_log import HttpLog
from vllm_teach.serving.http.service import Service
from vllm_teach.serving.http.settings import AppSettings
from vllm_teach.serving.http.turns import InTurn
from vllm_teach.serving.metrics.event_loop_lag import watch_event_loop
from vllm_teach.version import __version__

if TYPE_CHECKING:
    from vllm_teach.serving.metrics.server_metrics import ServerMetrics

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused, or took too long."},
    "5XX": {"model": ErrorResponse, "description": "It failed here; 503: the engine is down."},
}


def create_app(
    engine: AsyncLLMEngine, settings: AppSettings | None = None, metrics: ServerMetrics | None = None
) -> FastAPI:
    """Return the app. It neither starts nor stops `engine`: until it is started, requests are answered with 503.

    Without `metrics` there is no `/metrics`.
    """
    service = Service(engine, settings or AppSettings(), metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if metrics is None:
            yield
            return
        async with watch_event_loop(metrics.on_event_loop_lag):
            yield

    app = FastAPI(
        title="vllm_teach",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    app.state.service = service
    for routes in (completions, chat, generate_route, tokenize_routes, status_routes):
        app.include_router(routes.router)
    if metrics is not None:
        app.include_router(status_routes.metrics_router)
    _add_error_handlers(app, service)
    # The last one added is the outermost.
    app.add_middleware(InTurn)
    app.add_middleware(BodyLimit, service=service)
    if service.settings.api_key is not None:
        app.add_middleware(ApiKeyGuard, service=service, key=service.settings.api_key)
    app.add_middleware(HttpLog, service=service)
    return app


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        # A probe of a dead engine is no request, and there are many.
        if not getattr(request.state, "in_engine", False) and request.url.path != "/health":
            service.count_error(error)
        return describe_error(error, service.settings.retry_after).response()

    async def answer_validation(request: Request, error: Exception) -> Response:
        content_type = request.headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            return await answer(request, _no_json(content_type))
        found = cast("Sequence[dict[str, Any]]", cast(RequestValidationError, error).errors())
        return await answer(request, describe_validation(found))

    async def answer_http(request: Request, error: Exception) -> Response:
        return await answer(request, _of_starlette(request, cast(HTTPException, error)))

    async def answer_nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nginx's number for a client that went away

    app.add_exception_handler(VllmTeachError, answer)
    app.add_exception_handler(RequestValidationError, answer_validation)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(ClientDisconnect, answer_nobody)


def _no_json(content_type: str) -> ApiError:
    message = f"the content type is {shown(content_type)}: send JSON, as 'Content-Type: application/json'."
    return ApiError(message, 415, code="unsupported_content_type")


def _of_starlette(request: Request, error: HTTPException) -> ApiError:
    """Return what Starlette and FastAPI refuse by themselves as an error of ours."""
    path, headers = shown(request.url.path), dict(error.headers or {})
    match error.status_code:
        case 404:
            return ApiError(f"there is no {path} here: look at /openapi.json for what there is.", 404, code="not_found")
        case 405:
            allowed = headers.get("allow", headers.get("Allow", "another one"))
            if allowed == "GET":  # HEAD has a route of its own
                allowed, headers = "GET, HEAD", {"allow": "GET, HEAD"}
            message = f"{path} does not take {request.method}: use {allowed}."
            return ApiError(message, 405, code="method_not_allowed", headers=headers)
        case 400:  # FastAPI says this of a body that is too deep, or no UTF-8
            return ApiError("the body cannot be read as JSON: send a plain object in UTF-8.")
    return ApiError(f"{error.detail}.", error.status_code, headers=headers)
