"""The project's own scheduler and KV cache on a virtual clock: any model on any hardware, on a laptop. Modelled.

`traffic` and `request_trace` say what comes, `deployment` on what it is served, `virtual_time` plays it through;
`serving` has what came of it, `serving_table` shows it, and `capacity` asks how much more would do.

    report = simulate_serving(
        "llama-2-70b", "a100-80gb-sxm", tensor_parallel_size=8, workload=draw_traffic(1000, (2048, 512))
    )
    print(format_serving(report))
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Capacity": "capacity",
    "Objective": "capacity",
    "find_max_rate": "capacity",
    "Deployment": "deployment",
    "deploy": "deployment",
    "read_request_trace": "request_trace",
    "ServingReport": "serving",
    "serve": "serving",
    "simulate_serving": "serving",
    "format_capacity": "serving_table",
    "format_serving": "serving_table",
    "Traffic": "traffic",
    "draw_traffic": "traffic",
}

__all__ = [
    "Capacity",
    "Deployment",
    "Objective",
    "ServingReport",
    "Traffic",
    "deploy",
    "draw_traffic",
    "find_max_rate",
    "format_capacity",
    "format_serving",
    "read_request_trace",
    "serve",
    "simulate_serving",
]

if TYPE_CHECKING:
    from vllm_teach.performance.simulator.capacity import Capacity, Objective, find_max_rate
    from vllm_teach.performance.simulator.deployment import Deployment, deploy
    from vllm_teach.performance.simulator.request_trace import read_request_trace
    from vllm_teach.performance.simulator.serving import ServingReport, serve, simulate_serving
    from vllm_teach.performance.simulator.serving_table import format_capacity, format_serving
    from vllm_teach.performance.simulator.traffic import Traffic, draw_traffic


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
