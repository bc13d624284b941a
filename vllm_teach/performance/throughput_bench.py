"""`vllm-teach bench throughput`: useful output tokens a second of this engine, beside another system's best.

Both serve the same requests with the same weights, dtype and threads, in the same rounds; what is compared is the ratio
within a round (`race`). The other system is tuned first. One trial of each way to batch is no measurement on a machine
that is never quite idle, so the two fastest run in every round, and the faster of these is what we are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_teach import data
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.models.resolve import resolve_model
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.peers import BATCH_SIZES, ORDERS, StaticBatches, TransformersPeer, Trial, make_peer
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.step_profile import StepParts, StepProfile, measure_step_parts, profile_steps
from vllm_teach.performance.timing import Timing, check_calls
from vllm_teach.performance.workload import INPUTS, OUTPUTS, Workload, draw_workload

if TYPE_CHECKING:
    from tqdm import tqdm

OURS, _OUR_WAY = "vllm_teach", "continuous batching"
_TEXT = "texts/corran_sound.txt"
_FINALISTS = 2
# The decode steps that are looked into: short prompts, as attention over long ones would hide the bookkeeping.
_STEP_SEQUENCES, _STEP_INPUTS = 64, (16, 64)


@dataclass(frozen=True)
class Mix:
    """How many requests, and the bounds of their prompt and output lengths in tokens; each is drawn from `seed`."""

    count: int = 64
    inputs: tuple[int, int] = INPUTS
    outputs: tuple[int, int] = OUTPUTS
    seed: int = 0
    profiled_steps: int = 20


FULL = Mix()
QUICK = Mix(16, (16, 128), (16, 64), profiled_steps=5)


@dataclass(frozen=True)
class Row:
    """One system: how it ran, its seconds for all requests, and its useful output tokens a second."""

    system: str
    how: str
    seconds: Timing
    tokens_per_second: Timing


@dataclass(frozen=True)
class ThroughputBench:
    """The whole result. `speedup` is the other system's seconds over ours in the same round; None without another.

    Of several ways to run the other system it is the fastest's: the least speed-up, by the median.
    """

    model: str
    dtype: str
    mix: Mix
    num_input_tokens: int
    num_output_tokens: int
    rounds: int
    rows: list[Row]
    speedup: Timing | None
    trials: list[Trial]
    step: StepParts
    profile: StepProfile
    environment: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self) | {"bookkeeping_share": self.step.bookkeeping_share}


def bench_throughput(
    model: str | Path = "smollm2",
    *,
    compare: str | None = "transformers",
    rounds: int = 3,
    dtype: str = "bfloat16",
    mix: Mix = FULL,
    progress: bool = True,
) -> ThroughputBench:
    """Measure on the CPU. Ours runs as `LLM` does by default, but for the prefix cache: rounds repeat their prompts.

    `compare` None measures ours alone. Raises InvalidArgumentError for an unknown system, `rounds` below 1 and a mix
    that is longer than the model's context; ModelNotFoundError if the model is not here.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    path = resolve_model(model)
    llm = LLM(path, dtype=dtype, device="cpu", enable_prefix_caching=False)
    peer = None if compare is None else make_peer(compare, path, llm.model.dtype)
    text_ids = llm.tokenizer.encode(data.path(_TEXT).read_text(encoding="utf-8"))
    workload = draw_workload(text_ids, mix.count, inputs=mix.inputs, outputs=mix.outputs, seed=mix.seed)
    if mix.inputs[1] + mix.outputs[1] > llm.engine.max_model_len:
        raise InvalidArgumentError(
            f"mix has requests of up to {mix.inputs[1] + mix.outputs[1]} tokens, but the model's context is "
            f"{llm.engine.max_model_len}: use shorter ones (--quick)."
        )
    sizes = {min(size, mix.count) for size in BATCH_SIZES}
    total = 2 + rounds + (0 if peer is None else rounds * _FINALISTS + len(sizes) + len(ORDERS) - 1)
    with tqdm(total=total, desc="bench throughput", disable=not progress) as bar:
        short = draw_workload(text_ids, _STEP_SEQUENCES, inputs=_STEP_INPUTS, outputs=(1, 1), seed=mix.seed)
        bar.set_postfix_str("bookkeeping")
        step = measure_step_parts(llm, short, mix.profiled_steps)
        bar.update()
        bar.set_postfix_str("profile")
        profile = profile_steps(llm, short, max(1, mix.profiled_steps // 4))
        bar.update()
        trials = [] if peer is None else _tune(peer, workload, bar)
        ways = [trial.batches for trial in sorted(trials, key=lambda trial: (trial.stopped, trial.seconds))]
        rows, speedup = _race(llm, peer, ways[:_FINALISTS], workload, rounds, bar)
    return ThroughputBench(
        str(model),
        str(llm.model.dtype).removeprefix("torch."),
        mix,
        workload.num_input_tokens,
        workload.num_output_tokens,
        rounds,
        rows,
        speedup,
        trials,
        step,
        profile,
        asdict(describe_environment()),
    )


def serve(llm: LLM, workload: Workload) -> None:
    """Let `llm` generate what `workload` asks for, greedily. Raises EngineError if a request got another length."""
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in workload.output_lens
    ]
    outputs = llm.generate([list(prompt) for prompt in workload.prompts], params, use_tqdm=False)
    lengths = tuple(len(output.outputs[0].token_ids) for output in outputs)
    if lengths != workload.output_lens:
        raise EngineError("the engine ended requests before their last token: its seconds say nothing.")


def _tune(peer: TransformersPeer, workload: Workload, bar: tqdm) -> list[Trial]:
    """Find the peer's fastest batches; the first call warms it up."""
    bar.set_postfix_str(f"{peer.name} loads")
    peer.run(_sample(workload))
    bar.set_postfix_str(f"{peer.name}, several batch sizes")
    trials = []
    for trial in peer.tune(workload):
        trials.append(trial)
        bar.update()
        bar.set_postfix_str(f"{peer.name} after {trial.batches}")
    return trials


def _race(
    llm: LLM,
    peer: TransformersPeer | None,
    ways: list[StaticBatches],
    workload: Workload,
    rounds: int,
    bar: tqdm,
) -> tuple[list[Row], Timing | None]:
    """Serve the workload once by each system, and in each of the other's ways, in each round."""
    serve(llm, _sample(workload))  # warms up

    def ticking(run: Callable[[], object]) -> None:
        run()
        bar.update()

    runners: dict[str, Callable[[], object]] = {_OUR_WAY: partial(ticking, partial(serve, llm, workload))}
    if peer is not None:
        runners |= {str(way): partial(ticking, partial(peer.run_in, way, workload)) for way in ways}
    result = race(runners, _OUR_WAY, rounds=rounds, warmup=0, announce=bar.set_postfix_str)
    tokens, rows = workload.num_output_tokens, []
    for way, seconds in result.seconds.items():
        system = OURS if way == _OUR_WAY or peer is None else peer.name
        rows.append(Row(system, way, seconds, Timing.of([tokens / each for each in seconds.samples])))
    others = [ratio for way, ratio in result.ratios.items() if way != _OUR_WAY]
    return rows, min(others, key=lambda ratio: ratio.median, default=None)


def _sample(workload: Workload) -> Workload:
    """The shortest few requests, to warm up with."""
    return workload.part(sorted(range(len(workload)), key=lambda i: workload.output_lens[i])[:4])


def format_throughput(bench: ThroughputBench) -> str:
    """Return the result as a table of plain text."""
    threads = bench.environment.get("torch_threads", torch.get_num_threads())
    mix = bench.mix
    lines = [
        f"{bench.model}, {bench.dtype}, cpu, {threads} threads: {mix.count} requests (seed {mix.seed}), "
        f"prompts of {mix.inputs[0]} to {mix.inputs[1]} tokens ({bench.num_input_tokens:,} in all), "
        f"outputs of {mix.outputs[0]} to {mix.outputs[1]} ({bench.num_output_tokens:,})",
        "",
        f"useful output tokens a second, median of {bench.rounds} rounds (lowest to highest)",
    ]
    for row in bench.rows:
        rate = row.tokens_per_second
        lines.append(
            f"  {row.system:<14}{rate.median:9.1f}  ({rate.low:.1f} to {rate.high:.1f}){row.seconds.median:9.1f} s"
            f"   {row.how}"
        )
    if bench.speedup is not None:
        ours = bench.speedup
        lines.append(
            f"  {OURS} is {ours.median:.2f} times as fast ({ours.low:.2f} to {ours.high:.2f}, ratios within a round)"
        )
        lines += ["", "static batches that were tried, once each"]
        lines += [f"  {trial.batches!s:<36}{_seconds(trial)}" for trial in bench.trials]
    return "\n".join([*lines, "", *_format_step(bench.step), "", *_format_profile(bench.profile)])


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
