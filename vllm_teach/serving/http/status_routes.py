"""What is here and how it does: `/v1/models`, `/health`, `/version`, `/metrics`.

Each takes HEAD, too, with which load balancers probe: the server leaves the body out (RFC 9110, section 9.3.2).
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from vllm_teach.serving.http.service import Service, ServiceOfApp
from vllm_teach.version import __version__

router = APIRouter()
metrics_router = APIRouter()


class Model(BaseModel):
    """A model that is served. `max_model_len`, prompt and answer together in tokens, and `root` are vLLM's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm_teach"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """All that are served: one model, under each of its names."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The engine is well; when it is not, the answer is an error with status 503."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """The version of vllm_teach."""

    version: str


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(service: ServiceOfApp) -> ModelList:
    """Return the names of the model."""
    return ModelList(data=[_model(service, name) for name in service.model_names])


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}")
async def get_model(model: str, service: ServiceOfApp) -> Model:
    """Return what is to know of a model."""
    service.check_model(model)
    return _model(service, model)


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(service: ServiceOfApp) -> Health:
    """Say whether the engine is well."""
    service.engine.check_health()
    return Health()


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> Version:
    """Say which version this is."""
    return Version(version=__version__)


@metrics_router.head("/metrics", include_in_schema=False)
@metrics_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceOfApp) -> Response:
    """Return all metrics in Prometheus' text format."""
    assert service.metrics is not None, "the route is there only where metrics are"
    body, content_type = service.metrics.render()
    return Response(body, media_type=content_type)


def _model(service: Service, name: str) -> Model:
    ready = service.engine.ready
    return Model(id=name, created=service.created, root=ready.model, max_model_len=ready.max_model_len)
