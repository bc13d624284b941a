"""One engine of a fleet, in a process that Ray starts on one of its machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric

from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.fleet.fleet_metrics import answer_for_all
from vllm_teach.serving.fleet.fleet_settings import FleetSettings
from vllm_teach.serving.fleet.ray_request_ids import LeaveRequestIdToRay
from vllm_teach.serving.http.app import create_app
from vllm_teach.serving.metrics.server_metrics import ServerMetrics

_METRICS_TIMEOUT = 5.0  # seconds; less than Prometheus waits (10)


class FleetReplica:
    """What `ray_app.build_app` makes a deployment of: the HTTP app around an engine in a process of its own.

    Ray calls the methods, all in one event loop. The engine's process has the environment that Ray gives the replica:
    its GPUs, and as many threads as it has CPUs. However the replica ends, its engine ends with it.
    """

    def __init__(self, settings: FleetSettings) -> None:
        from ray import serve

        self._settings = settings
        self._context = serve.get_replica_context()
        # The process's own figures would have no label to tell replicas apart by; Ray exports them itself.
        self._metrics = ServerMetrics(
            (settings.app.served_model_names or (settings.model,))[0],
            registry=CollectorRegistry(),
            engine=self._context.replica_id.unique_id,
        )
        self._engine = AsyncLLMEngine.spawn(
            settings.model,
            settings.engine_args,
            settings.limits,
            on_report=self._metrics.on_report,
            on_finished=self._metrics.on_finished,
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Load the model and return the app. What `LLM` raises makes Ray try it again, a few times."""
        self._metrics.on_ready(await self._engine.start())
        app = create_app(self._engine, self._settings.app, self._metrics)
        answer_for_all(app, self._ask_all)
        app.add_middleware(LeaveRequestIdToRay)
        return app

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine is dead or hangs: Ray ends this replica and starts another one."""
        self._engine.check_health()

    async def tell_metrics(self) -> list[Metric]:
        """Return this replica's metrics, for the one that was asked for all of them."""
        return list(self._metrics.registry.collect())

    async def __del__(self) -> None:
        """End the engine. Ray calls it when no request is in flight any more."""
        await self._engine.stop()

    async def _ask_all(self) -> Sequence[Iterable[Metric]]:
        from ray import serve

        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        return await handle.broadcast("tell_metrics").results_async(timeout_s=_METRICS_TIMEOUT)
