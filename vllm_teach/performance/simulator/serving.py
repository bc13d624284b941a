"""A simulated service: requests in, throughput and latencies out. Modelled, from the first figure to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_teach.engine.event_export import ENGINE, SEQUENCES, chrome_trace
from vllm_teach.performance.hardware import HardwareSpec
from vllm_teach.performance.load_test.log_histogram import PERCENTILES
from vllm_teach.performance.simulator.deployment import Deployment, deploy
from vllm_teach.performance.simulator.step_series import StepSeries
from vllm_teach.performance.simulator.traffic import Traffic
from vllm_teach.performance.virtual_time import RequestTimes, Simulation, quantile
from vllm_teach.version import __version__

LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class ServingReport:
    """What came of `workload` on `deployment`: `run` has the events and each request's times, `series` each step.

    Times are virtual seconds, from the arrival of each request; rates count from 0 to the last token.
    """

    deployment: Deployment
    workload: Traffic
    run: Simulation
    series: StepSeries

    @property
    def request_throughput(self) -> float:
        """Requests a second."""
        return len(self.workload.arrivals) / self.run.seconds

    @property
    def output_throughput(self) -> float:
        """Generated tokens a second."""
        return self.run.throughput

    @property
    def total_throughput(self) -> float:
        """Prompts' and generated tokens a second, those from the prefix cache included."""
        return (self.workload.num_prompt_tokens + self.run.num_output_tokens) / self.run.seconds

    @property
    def mean_kv_usage(self) -> float:
        """Held blocks / all blocks, 0 to 1, on average over the time in steps."""
        return self.series.mean("held_blocks") / self.deployment.num_blocks

    @property
    def peak_kv_usage(self) -> float:
        """The most held blocks / all blocks at the end of a step, 0 to 1."""
        return max(self.series.held_blocks) / self.deployment.num_blocks

    @property
    def latencies(self) -> dict[str, dict[str, float] | None]:
        """By LATENCIES: count, mean, percentiles and the largest, in seconds; None where no output had two tokens."""
        return {name: _summary(latencies_of(self.run.times, name)) for name in LATENCIES}

    def chrome_trace(self) -> dict[str, Any]:
        """Return the events as `event_export.chrome_trace` does; both groups of tracks say that they are modelled."""
        trace = chrome_trace(self.run.events)
        labels = {"labels": f"modelled: {self.deployment.model} on {self.deployment.hardware.title}"}
        names = [{"ph": "M", "name": "process_labels", "pid": pid, "args": labels} for pid in (ENGINE, SEQUENCES)]
        return {**trace, "traceEvents": trace["traceEvents"] + names}

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, without the events; the steps are thinned to 500 rows."""
        usage = self.run.kv.usage()
        return {
            "modelled": True,
            "vllm_teach": __version__,
            "deployment": self.deployment.to_json(),
            "workload": {
                "description": str(self.workload),
                "num_requests": len(self.workload.arrivals),
                "prompt_tokens": self.workload.num_prompt_tokens,
                "output_tokens": self.workload.num_output_tokens,
            },
            "seconds": self.run.seconds,
            "busy_seconds": self.series.busy_seconds,
            "num_steps": self.run.num_steps,
            "requests_per_second": self.request_throughput,
            "output_tokens_per_second": self.output_throughput,
            "total_tokens_per_second": self.total_throughput,
            "computed_tokens": self.run.num_computed,
            "latencies": self.latencies,
            "mean_kv_usage": self.mean_kv_usage,
            "peak_kv_usage": self.peak_kv_usage,
            "mean_running": self.series.mean("running"),
            "most_waiting": max(self.series.waiting),
            "preemptions": self.run.num_preemptions,
            "swapped_out_blocks": usage.swapped_out,
            "swapped_in_blocks": usage.swapped_in,
            "prefix_hit_rate": usage.hit_rate,
            "steps": self.series.thinned(),
        }


def simulate_serving(
    model: str | Path,
    hardware: str | HardwareSpec,
    *,
    workload: Traffic,
    max_events: int | None = None,
    **deployment: Any,
) -> ServingReport:
    """Serve `workload` with the project's own scheduler and KV cache on `hardware` that need not be there.

    `deployment` is what `deploy` takes beside model and hardware: `tensor_parallel_size`, `dtype`, `quantization`, the
    engine's settings. Of the events the newest `max_events` are kept, or all. Raises what `deploy` and
    `Deployment.simulate` raise.
    """
    return serve(deploy(model, hardware, **deployment), workload, max_events=max_events)


def serve(deployment: Deployment, workload: Traffic, *, max_events: int | None = None) -> ServingReport:
    """Return what comes of `workload` on `deployment`."""
    series = StepSeries()
    run = deployment.simulate(workload, watch=series, max_events=max_events)
    return ServingReport(deployment, workload, run, series)


def latencies_of(times: Sequence[RequestTimes], name: str) -> list[float]:
    """Return the seconds of one of LATENCIES: of each request, or for "itl" of each gap between two tokens.

    "tpot" is a request's mean gap; one with a single token has none.
    """
    if name == "ttft":
        return [each.to_first_token for each in times]
    if name == "e2e":
        return [each.latency for each in times]
    if name == "itl":
        return [gap for each in times for gap in each.gaps]
    return [(each.tokens[-1] - each.tokens[0]) / (len(each.tokens) - 1) for each in times if len(each.tokens) > 1]


def _summary(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    values.sort()  # for `quantile`, which sorts what it gets
    percentiles = {f"p{percent}": quantile(values, percent / 100) for percent in PERCENTILES}
    return {"count": len(values), "mean": sum(values) / len(values), **percentiles, "max": values[-1]}
