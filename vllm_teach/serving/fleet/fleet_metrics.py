"""One `/metrics` for a fleet: through a proxy a scrape reaches any one replica, which answers for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from starlette.responses import PlainTextResponse, Response

from vllm_teach.serving.http.http_errors import ApiError

Gather = Callable[[], Awaitable[Sequence[Iterable[Metric]]]]


class MergedMetrics:
    """What `generate_latest` takes for a registry: the metrics of several, each name once with all of its samples.

    The registries' samples must differ in a label, as those of `ServerMetrics` do in `engine`.
    """

    def __init__(self, registries: Sequence[Iterable[Metric]]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        merged: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry:
                one = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                one.samples.extend(metric.samples)
        yield from merged.values()


def answer_for_all(app: FastAPI, gather: Gather) -> None:
    """Let the app's `/metrics` tell what `gather` brings, the metrics of every replica.

    When one of them does not answer, the scrape fails with 503: a sum that lacks a part would look like a fall.
    """

    async def fleet_metrics() -> Response:
        try:
            registries = await gather()
        except Exception as error:
            message = f"a replica does not tell its metrics ({type(error).__name__}): ask again."
            raise ApiError(message, 503, code="metrics_unavailable", type="server_error") from error
        return Response(generate_latest(MergedMetrics(registries)), media_type=CONTENT_TYPE_LATEST)

    # Before the app's own route, which stands in its description.
    route = APIRoute("/metrics", fleet_metrics, response_class=PlainTextResponse, include_in_schema=False)
    app.router.routes.insert(0, route)
