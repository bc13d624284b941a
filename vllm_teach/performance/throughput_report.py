"""What `vllm-teach bench throughput` found: the systems' tokens a second, their ratios, what a step is made of."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field

import torch

from vllm_teach.performance.peer_choice import MissingPeer
from vllm_teach.performance.peers import BATCH_SIZES, ORDERS, Trial
from vllm_teach.performance.step_profile import StepParts, StepProfile
from vllm_teach.performance.timing import Timing
from vllm_teach.performance.workload import INPUTS, OUTPUTS

OURS, OUR_WAY = "vllm_teach", "continuous batching"


@dataclass(frozen=True)
class Mix:
    """How many requests, and the bounds of their prompt and output lengths in tokens; each is drawn from `seed`.

    `profiled_steps` of decode are looked into; `batch_sizes` and `orders` are what static batches are tried with.
    """

    count: int = 64
    inputs: tuple[int, int] = INPUTS
    outputs: tuple[int, int] = OUTPUTS
    seed: int = 0
    profiled_steps: int = 20
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    orders: tuple[str, ...] = ORDERS


FULL = Mix()
QUICK = Mix(16, (16, 128), (16, 64), profiled_steps=5, batch_sizes=(16, 8), orders=("output length",))


@dataclass(frozen=True)
class Row:
    """One system in one of its ways to run: its seconds for all requests, its useful output tokens a second.

    `version` is the system's, where it runs in a process of its own.
    """

    system: str
    how: str
    seconds: Timing
    tokens_per_second: Timing
    version: str | None = None


@dataclass(frozen=True)
class ThroughputBench:
    """The whole result. `speedups` has, by system, its seconds over ours in the same round.

    Of several ways to run a system it is the fastest's: the least speed-up, by the median. `missing` systems were asked
    for and have no figures; `trials` are those of static batches.
    """

    model: str
    dtype: str
    mix: Mix
    num_input_tokens: int
    num_output_tokens: int
    rounds: int
    rows: list[Row]
    speedups: dict[str, Timing]
    missing: list[MissingPeer]
    trials: list[Trial]
    step: StepParts
    profile: StepProfile
    environment: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self) | {"bookkeeping_share": self.step.bookkeeping_share}


def format_throughput(bench: ThroughputBench) -> str:
    """Return the result as a table of plain text."""
    threads = bench.environment.get("torch_threads", torch.get_num_threads())
    mix = bench.mix
    lines = [
        f"{bench.model}, {bench.dtype}, cpu, {threads} threads: {mix.count} requests (seed {mix.seed}), "
        f"prompts of {_bounds(mix.inputs)} tokens ({bench.num_input_tokens:,} in all), "
        f"outputs of {_bounds(mix.outputs)} ({bench.num_output_tokens:,})",
        "",
        f"useful output tokens a second, median of {bench.rounds} rounds (lowest to highest)",
    ]
    for row in bench.rows:
        rate = row.tokens_per_second
        version = f"{row.version}: " if row.version else ""
        lines.append(
            f"  {row.system:<14}{rate.median:9.1f}  ({rate.low:.1f} to {rate.high:.1f}){row.seconds.median:9.1f} s"
            f"   {version}{row.how}"
        )
    for system, ours in bench.speedups.items():
        lines.append(
            f"  {OURS} is {ours.median:.2f} times as fast as {system} "
            f"({ours.low:.2f} to {ours.high:.2f}, ratios within a round)"
        )
    lines += _format_missing(bench.missing)
    if bench.trials:
        lines += ["", "static batches of transformers that were tried, once each"]
        lines += [f"  {trial.batches!s:<36}{_seconds(trial)}" for trial in bench.trials]
    return "\n".join([*lines, "", *_format_step(bench.step), "", *_format_profile(bench.profile)])


def _bounds(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"


def _format_missing(missing: list[MissingPeer]) -> list[str]:
    lines = ["", "not in the table"] if missing else []
    for peer in missing:
        lines += textwrap.wrap(
            peer.reason,
            118,
            initial_indent=f"  {peer.system:<14}",
            subsequent_indent=" " * 16,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _seconds(trial: Trial) -> str:
    return f"stopped after {trial.seconds:.1f} s" if trial.stopped else f"{trial.seconds:.1f} s"


def _format_step(step: StepParts) -> list[str]:
    parts = {"schedule": step.schedule, "update": step.update, "requests, outputs": step.around}
    return [
        f"a decode step of {step.num_sequences} sequences takes {step.step * 1e3:.1f} ms "
        f"(medians of {step.num_steps} steps), of which bookkeeping is {step.bookkeeping_share:.1%}",
        *(f"  {name:<36}{seconds * 1e3:9.2f} ms" for name, seconds in parts.items()),
        f"  {'batch inputs (part of the runner)':<36}{step.inputs * 1e3:9.2f} ms",
    ]


def _format_profile(profile: StepProfile) -> list[str]:
    return [
        f"where the time of such steps goes, under torch.profiler ({profile.num_steps} steps)",
        *(f"  {kind:<36}{share:9.1%}" for kind, share in sorted(profile.shares.items(), key=lambda each: -each[1])),
    ]
