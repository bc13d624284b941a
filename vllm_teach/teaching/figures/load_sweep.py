"""A server under more and more clients: what it puts out, and what each of them waits for."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.load_test.report import LoadReport
from vllm_teach.teaching import style


@dataclass(frozen=True)
class LoadSweep:
    """By the number of clients: output tokens a second, and in seconds p50 and p99 of first token and token gap."""

    clients: tuple[int, ...]
    throughput: tuple[float, ...]
    ttft_p50: tuple[float, ...]
    ttft_p99: tuple[float, ...]
    itl_p99: tuple[float, ...]


def load_sweep(reports: Mapping[int, LoadReport]) -> LoadSweep:
    """Collect the figures of load tests that were streamed, in the order of the clients. Needs two or more."""
    if len(reports) < 2:
        raise InvalidArgumentError(f"reports has {len(reports)}: a sweep needs at least two.")
    clients = tuple(sorted(reports))
    tallies = [reports[each].tally for each in clients]
    return LoadSweep(
        clients,
        tuple(tally.rate(tally.output_tokens) for tally in tallies),
        tuple(tally.latencies["ttft"].quantile(0.5) for tally in tallies),
        tuple(tally.latencies["ttft"].quantile(0.99) for tally in tallies),
        tuple(tally.latencies["itl"].quantile(0.99) for tally in tallies),
    )


def draw_load_sweep(data: LoadSweep, *, title: str) -> Figure:
    """Draw throughput, and on a logarithmic axis the waits, over the number of clients; returns the figure."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8))
    left.plot(data.clients, data.throughput, "o-", color=style.colour("measured"))
    left.set_ylim(0, 1.1 * max(data.throughput))
    style.label_axis(left, "y", "output", unit="tokens/s")
    for values, look, name in (
        (data.ttft_p99, ("^-", style.colour("prefill")), "first token, p99"),
        (data.ttft_p50, ("o--", style.colour("prefill")), "first token, median"),
        (data.itl_p99, ("s-", style.colour("decode")), "next token, p99"),
    ):
        right.plot(data.clients, values, look[0], color=look[1], label=name)
    style.label_axis(right, "y", "wait", kind="seconds", log=10)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1)
    for ax in (left, right):
        style.label_axis(ax, "x", "clients at once", kind="tokens", log=2, ticks=data.clients)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
