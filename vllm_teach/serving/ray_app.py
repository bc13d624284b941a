"""The HTTP service on a Ray cluster: as many replicas as the load needs, on as many machines as there are.

    serve run vllm_teach.serving.ray_app:build_app model=smollm2 max_replicas=8 num_cpus=4

or, in a configuration for `serve deploy`, `import_path: vllm_teach.serving.ray_app:build_app` and the same names under
`args`; `read_fleet_settings` says which there are. vllm_teach must be installed on every machine, and the model there.

Ray's proxies, one a machine, take the requests; each goes to the replica that has the fewest. A replica is the app of
`vllm-teach serve` around an engine of its own: the same routes, streams, errors and limits. A client that goes away
ends its request. A replica whose engine dies, or that dies itself, is replaced; what it had in flight fails. One that
is no longer needed gets no more requests and finishes those that it has. While none is ready, Ray answers 503. To end
it all without cutting a stream, take the application away first (`ray.serve.delete`): `serve shutdown`, and Ctrl-C in
`serve run`, end the proxies at once.

`/metrics`, asked at any proxy, tells those of all replicas, which the label `engine` tells apart: one target for
Prometheus, however many replicas there are. What Ray itself counts (requests in its proxies, replicas, restarts) is
exported by each machine, where `ray metrics launch-prometheus` finds it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_teach.errors import MissingDependencyError, installs

if TYPE_CHECKING:
    from ray.serve import Application

_HEALTH_CHECK_TIMEOUT = 30.0  # seconds; a replica that says nothing for so long is replaced
_LAST_WORDS = 5.0  # seconds, to end the engine after the drain
_ATTEMPTS = 3  # to load the model, which fails again where the arguments are wrong


def build_app(arguments: Mapping[str, Any]) -> Application:
    """Return the application that `arguments` describe, for `serve run` and `ray.serve.run`.

    The API key is the argument `api_key` or else the variable VLLM_TEACH_API_KEY of this process. Raises
    InvalidArgumentError (see `read_fleet_settings`), and MissingDependencyError where Ray Serve is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingDependencyError(f"Ray Serve is not installed: run {installs('ray')}.") from error
    from vllm_teach.serving.fleet.fleet_replica import FleetReplica
    from vllm_teach.serving.fleet.fleet_settings import read_fleet_settings
    from vllm_teach.serving.fleet.least_busy import LeastBusyRouter

    settings = read_fleet_settings({"api_key": os.environ.get("VLLM_TEACH_API_KEY") or None, **arguments})
    scaling = settings.scaling
    deployment = serve.deployment(
        serve.ingress()(FleetReplica),
        name="vllm_teach",
        autoscaling_config={
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "target_ongoing_requests": settings.target_ongoing_requests,
            "upscale_delay_s": scaling.upscale_delay,
            "downscale_delay_s": scaling.downscale_delay,
        },
        max_ongoing_requests=settings.max_ongoing_requests,
        request_router_config={"request_router_class": LeastBusyRouter},
        ray_actor_options={"num_cpus": scaling.num_cpus, "num_gpus": scaling.num_gpus},
        graceful_shutdown_timeout_s=scaling.drain_timeout + _LAST_WORDS,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=scaling.health_check_period,
        health_check_timeout_s=_HEALTH_CHECK_TIMEOUT,
        max_constructor_retry_count=_ATTEMPTS,
    )
    return deployment.bind(settings)
