"""A simulated service over time: who runs and who waits, how full the KV cache is, and what tokens are computed."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.performance.simulator.serving import ServingReport
from vllm_teach.teaching import style


@dataclass(frozen=True)
class ServiceOverTime:
    """At `times`, in virtual seconds: sequences, the share of the KV cache in use, and tokens a second of both kinds.

    Each entry stands for equally many steps: tokens are their mean rate, the rest is as the last of them left it.
    """

    times: tuple[float, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    kv_usage: tuple[float, ...]
    prefill_rate: tuple[float, ...]
    decode_rate: tuple[float, ...]


def service_over_time(report: ServingReport, points: int = 300) -> ServiceOverTime:
    """Read at most `points` entries out of the steps of `report`."""
    rows = report.series.thinned(points)

    def rates(column: str) -> tuple[float, ...]:
        return tuple(
            tokens / seconds if seconds else 0.0 for tokens, seconds in zip(rows[column], rows["seconds"], strict=True)
        )

    return ServiceOverTime(
        times=tuple(rows["start"]),
        running=tuple(int(count) for count in rows["running"]),
        waiting=tuple(int(count) for count in rows["waiting"]),
        kv_usage=tuple(blocks / report.deployment.num_blocks for blocks in rows["held_blocks"]),
        prefill_rate=rates("prefill_tokens"),
        decode_rate=rates("decode_tokens"),
    )


def draw_service_over_time(data: ServiceOverTime, *, title: str) -> Figure:
    """Draw three panels over virtual time; returns the figure."""
    figure, (sequences, cache, tokens) = plt.subplots(3, 1, figsize=(7.4, 6.6), sharex=True)
    sequences.step(data.times, data.running, where="post", color=style.colour("ideal"), label="running")
    sequences.step(data.times, data.waiting, where="post", color=style.colour("limit"), label="waiting")
    style.label_axis(sequences, "y", "sequences", kind="tokens")
    cache.fill_between(data.times, [100 * share for share in data.kv_usage], step="post", color=style.colour("paged"))
    cache.set_ylim(0, 100)
    style.label_axis(cache, "y", "KV blocks in use", unit="%")
    for rate, phase in ((data.prefill_rate, "prefill"), (data.decode_rate, "decode")):
        tokens.step(data.times, rate, where="post", color=style.colour(phase), label=phase)
    style.label_axis(tokens, "y", "tokens/s", kind="count")
    style.label_axis(tokens, "x", "time", unit="s, modelled")
    for ax in (sequences, tokens):
        ax.set_ylim(bottom=0)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
