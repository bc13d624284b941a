"""What the token budget trades: output tokens per second against the wait for the next token, and for the first."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.virtual_time import Simulation
from vllm_teach.teaching import style


@dataclass(frozen=True)
class BudgetSweep:
    """For each budget: steps, output tokens a second, and in seconds the p99 of the gaps, the median and p99 TTFT."""

    budgets: tuple[int, ...]
    num_steps: tuple[int, ...]
    throughput: tuple[float, ...]
    gap_p99: tuple[float, ...]
    ttft_p50: tuple[float, ...]
    ttft_p99: tuple[float, ...]


def budget_sweep(runs: Mapping[int, Simulation]) -> BudgetSweep:
    """Collect the figures of simulations by budget, in the order of the budgets. Needs two or more."""
    if len(runs) < 2:
        raise InvalidArgumentError(f"runs has {len(runs)} budgets: a sweep needs at least two.")
    ordered = [runs[budget] for budget in sorted(runs)]
    return BudgetSweep(
        tuple(sorted(runs)),
        tuple(run.num_steps for run in ordered),
        tuple(run.throughput for run in ordered),
        tuple(run.gap(0.99) for run in ordered),
        tuple(run.to_first_token(0.5) for run in ordered),
        tuple(run.to_first_token(0.99) for run in ordered),
    )


def draw_budget_sweep(data: BudgetSweep, *, title: str) -> Figure:
    """Draw throughput, and on a logarithmic axis the three waits, over the budget; returns the figure."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8))
    left.plot(data.budgets, data.throughput, "o-", color=style.colour("ideal"))
    left.set_ylim(0, 1.1 * max(data.throughput))
    style.label_axis(left, "y", "output", unit="tokens/s, modelled")
    for values, look, name in (
        (data.ttft_p99, ("^-", style.colour("prefill")), "first token, p99"),
        (data.ttft_p50, ("o--", style.colour("prefill")), "first token, median"),
        (data.gap_p99, ("s-", style.colour("decode")), "next token, p99"),
    ):
        right.plot(data.budgets, values, look[0], color=look[1], label=name)
    style.label_axis(right, "y", "wait, modelled", kind="seconds", log=10)
    right.set_ylim(top=max(data.ttft_p99) * 1.6)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1)
    for ax in (left, right):
        style.label_axis(ax, "x", "max_num_batched_tokens", kind="tokens", log=2, ticks=data.budgets[::2])
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    return figure
