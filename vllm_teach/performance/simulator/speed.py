"""`vllm-teach bench simulate`: how fast the simulator itself is on this machine. Measured."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.simulator.deployment import Deployment, deploy
from vllm_teach.performance.simulator.traffic import draw_traffic
from vllm_teach.performance.timing import check_calls

BATCHES = (1, 64, 256)
_TOKENS = 131_072  # tokens generated at each batch size, in all


@dataclass(frozen=True)
class StepRate:
    """Of steps in which `num_seqs` sequences decode: simulated steps a second of processor time, one for each round."""

    num_seqs: int
    num_steps: int
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """The median."""
        return median(self.rates)


@dataclass(frozen=True)
class SimulatorBench:
    """The rates by batch size, of simulating `model` on `hardware`, on the machine that `environment` describes."""

    model: str
    hardware: str
    rows: tuple[StepRate, ...]
    environment: dict[str, Any]

    def to_json(self) -> dict[str, object]:
        """Return it as plain data."""
        rows = [
            {"num_seqs": each.num_seqs, "num_steps": each.num_steps, "steps_per_second": list(each.rates)}
            for each in self.rows
        ]
        return {"model": self.model, "hardware": self.hardware, "rows": rows, "environment": self.environment}


def bench_simulator(
    model: str = "llama-2-70b", hardware: str = "a100-80gb-sxm", tensor_parallel_size: int = 8, rounds: int = 3
) -> SimulatorBench:
    """Simulate decoding batches of 1, 64 and 256 sequences, each `rounds` times, in one thread.

    Each sequence has a prompt of 16 tokens, which the first step computes. Processor time is counted, so that other
    programs disturb less. Raises what `deploy` raises.
    """
    check_calls("rounds", rounds, 1, "measures nothing")
    deployment = deploy(model, hardware, tensor_parallel_size=tensor_parallel_size, max_num_batched_tokens=16 * 256)
    rows: list[StepRate] = []
    for num_seqs in BATCHES:
        measured = [_steps_a_second(deployment, num_seqs) for _ in range(rounds)]
        rows.append(StepRate(num_seqs, measured[0][0], tuple(rate for _, rate in measured)))
    return SimulatorBench(model, hardware, tuple(rows), asdict(describe_environment()))


def format_simulator_bench(bench: SimulatorBench) -> str:
    """Return the table; rates are medians, with the slowest and the fastest round."""
    lines = [
        f"simulating {bench.model} on {bench.hardware}: decode steps, measured on {bench.environment['device']}",
        "",
        f"  {'sequences':>9}{'steps':>9}{'steps/s':>11}{'µs/sequence':>14}   rounds",
    ]
    for each in bench.rows:
        each_us = 1e6 / each.rate / each.num_seqs
        spread = f"{min(each.rates):,.0f} to {max(each.rates):,.0f}"
        lines.append(f"  {each.num_seqs:>9}{each.num_steps:>9,}{each.rate:>11,.0f}{each_us:>14.2f}   {spread}")
    return "\n".join(lines)


def _steps_a_second(deployment: Deployment, num_seqs: int) -> tuple[int, float]:
    output = min(_TOKENS // num_seqs, deployment.max_model_len - 16)
    traffic = draw_traffic(num_seqs, (16, output))
    started = time.process_time()
    run = deployment.simulate(traffic, max_events=1)
    return run.num_steps, run.num_steps / (time.process_time() - started)
