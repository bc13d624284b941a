"""`python -m vllm_teach.validation.simulator_accuracy`: does the simulator tell what the engine does on this machine?

In each round the engine first runs the scripts that the cost model is fitted to, and then serves `WORKLOADS`, of which
no step is fitted to: a slow minute falls on both. Afterwards the simulator, with the fitted costs and the engine's own
settings, serves the same workloads on its virtual clock. What is compared is throughput and mean time to first token.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import VllmTeachError
from vllm_teach.kvcache.length_mix import ALPACA, SHAREGPT, LengthMix
from vllm_teach.openmp import WAIT_SHORTLY, wait_shortly
from vllm_teach.performance.virtual_time import Arrival, Cost, simulate

if TYPE_CHECKING:
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.request import Request
    from vllm_teach.performance.cost_model.fit import Fit
    from vllm_teach.performance.cost_model.training_steps import Script

LIMIT = 0.15  # of the median error, over the workloads
_ROUNDS = 5


def _uniform(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> list[Arrival]:
    """Requests that come at once, with lengths drawn between bounds."""
    source = random.Random(seed)
    return [Arrival(source.randint(*inputs), source.randint(*outputs)) for _ in range(count)]


def _mix(mix: LengthMix, count: int, seed: int, rate: float, shorter: int = 1) -> list[Arrival]:
    """Requests of a mix, their outputs `shorter` times, as a Poisson process of `rate` a second."""
    source, now, found = random.Random(seed), 0.0, []
    for prompt_len, output_len in mix.draw(count, seed):
        found.append(Arrival(prompt_len, max(1, output_len // shorter), now))
        now += source.expovariate(rate)
    return found


def _bursts(size: int, every: float, arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, `size` of them every so many seconds."""
    return [Arrival(each.prompt_len, each.output_len, every * (i // size)) for i, each in enumerate(arrivals)]


WORKLOADS: Mapping[str, Sequence[Arrival]] = {
    "32 at once, 16-512 in, 16-128 out": _uniform(32, (16, 512), (16, 128), 1),
    "64 at once, 8-64 in, 8-64 out": _uniform(64, (8, 64), (8, 64), 2),
    "20 at once, 300 in, 100 out": _uniform(20, (300, 300), (100, 100), 6),
    "8 at once, 1,000-1,048 in, 32 out": _uniform(8, (1000, 1048), (32, 32), 5),
    "Alpaca's lengths, 3 a second": _mix(ALPACA, 40, 3, 3.0),
    "ShareGPT's, a third out, 0.8 a second": _mix(SHAREGPT, 16, 4, 0.8, 3),
    "one by one, 100 in, 60 out": _bursts(1, 4.0, [Arrival(100, 60)] * 4),
    "12 bursts of 4, 50-150 in, 20-40 out": _bursts(4, 1.0, _uniform(48, (50, 150), (20, 40), 7)),
}


@dataclass(frozen=True)
class Served:
    """Output tokens a second, from the first arrival to the last token, and the mean time to first token in seconds."""

    throughput: float
    mean_ttft: float


@dataclass(frozen=True)
class Comparison:
    """A workload served by the engine, once a round, and by the simulator."""

    workload: str
    measured: tuple[Served, ...]
    modelled: Served

    def median(self, figure: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(getattr(each, figure) for each in self.measured)

    def error(self, figure: str) -> float:
        """Return by what share the simulator errs; above 0 where it says more than was measured."""
        return float(getattr(self.modelled, figure) / self.median(figure)) - 1


@dataclass(frozen=True)
class Accuracy:
    """All comparisons, and the fit behind them."""

    fit: Fit
    comparisons: tuple[Comparison, ...]

    def median_error(self, figure: str) -> float:
        """Return the median of the workloads' errors, without their signs."""
        return statistics.median(abs(each.error(figure)) for each in self.comparisons)

    def passed(self) -> bool:
        """Whether both medians are within LIMIT."""
        return all(self.median_error(each.name) <= LIMIT for each in fields(Served))

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        medians = {each.name: self.median_error(each.name) for each in fields(Served)}
        return {
            "fit": self.fit.to_json(),
            "comparisons": [asdict(c) for c in self.comparisons],
            "median_error": medians,
        }

    def __str__(self) -> str:
        """Return the table: each workload's figures, with the lowest and highest, and what is left of each."""
        lines = [
            f"{'':<38}{'output tokens a second':^41}{'mean time to first token, ms':^43}",
            f"{'workload':<38}" + 2 * f"{'measured':>10} {'(from - to)':<17}{'modelled':>8}{'':>2}",
        ]
        for each in self.comparisons:
            cells = [f"{each.workload:<38}"]
            for figure, scale in (("throughput", 1), ("mean_ttft", 1000)):
                found = sorted(scale * getattr(served, figure) for served in each.measured)
                spread = f"({found[0]:,.0f} - {found[-1]:,.0f})"
                modelled = scale * getattr(each.modelled, figure)
                cells.append(
                    f"{scale * each.median(figure):>10,.1f} {spread:<15}{modelled:>10,.1f} {each.error(figure):>+6.1%}"
                )
            lines.append("".join(cells))
        throughput, ttft = (f"{self.median_error(each.name):.1%}" for each in fields(Served))
        return "\n".join(
            [
                *lines,
                f"median error: throughput {throughput}, mean time to first token {ttft}; the limit is {LIMIT:.0%}",
                f"the fit's own: {self.fit.median_error:.1%} over {len(self.fit.residuals)} kinds of steps",
            ]
        )


def measure_accuracy(
    model: str = "smollm2",
    rounds: int = _ROUNDS,
    *,
    scripts: tuple[Script, ...] | None = None,
    progress: bool = True,
) -> Accuracy:
    """Measure `scripts` and `WORKLOADS` round by round, fit, simulate, compare. Two minutes a round; writes nothing.

    Without `scripts` those of `vllm-teach tune --steps`. Raises InvalidArgumentError for `rounds` below 1.
    """
    from tqdm import tqdm

    from vllm_teach.performance.cost_model.training_steps import SCRIPTS
    from vllm_teach.performance.cost_model.tune import StepTuning
    from vllm_teach.performance.timing import check_calls

    check_calls("rounds", rounds, 1, "measures nothing")
    tuning = StepTuning(model, scripts=SCRIPTS if scripts is None else scripts)
    llm = tuning.llms[model]
    tuning.warm_up()
    source = random.Random(0)
    measured: dict[str, list[Served]] = {name: [] for name in WORKLOADS}
    names = list(WORKLOADS)
    with tqdm(total=rounds * (tuning.num_scripts + len(WORKLOADS)), disable=not progress) as bar:
        for number in range(rounds):
            tuning.run_round(lambda name: bar.update())
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                measured[name].append(serve(llm, WORKLOADS[name], source))
                bar.update()
    fit = tuning.fit()
    cost = fit.step_cost(llm.model.config)
    return Accuracy(
        fit,
        tuple(
            Comparison(name, tuple(measured[name]), serve_modelled(llm, arrivals, cost))
            for name, arrivals in WORKLOADS.items()
        ),
    )


def serve(llm: LLM, arrivals: Sequence[Arrival], source: random.Random) -> Served:
    """Serve `arrivals`, prompts of random tokens, each when it is due; the engine has nothing else to do."""
    engine, vocab_size = llm.engine, llm.model.config.vocab_size
    engine.reset_prefix_cache()
    prompts = [[source.randrange(vocab_size) for _ in range(each.prompt_len)] for each in arrivals]
    coming = sorted(range(len(arrivals)), key=lambda index: arrivals[index].time, reverse=True)
    running: dict[int, Request] = {}
    first_tokens: dict[int, float] = {}
    started = time.perf_counter()
    while coming or running:
        now = time.perf_counter() - started
        while coming and arrivals[coming[-1]].time <= now:
            index = coming.pop()
            params = SamplingParams(temperature=0, max_tokens=arrivals[index].output_len, ignore_eos=True)
            request_id = engine.add_request({"prompt_token_ids": prompts[index]}, params)
            running[index] = engine.get_request(request_id)
        if not running:
            time.sleep(arrivals[coming[-1]].time - now)
            continue
        engine.step()
        now = time.perf_counter() - started
        for index, request in list(running.items()):
            if request.error is not None:
                raise request.error
            if request.sequences[0].output_token_ids:
                first_tokens.setdefault(index, now - arrivals[index].time)
            if request.finished:
                del running[index]
    seconds = time.perf_counter() - started - min(each.time for each in arrivals)
    tokens = sum(each.output_len for each in arrivals)
    return Served(tokens / seconds, statistics.mean(first_tokens.values()))


def serve_modelled(llm: LLM, arrivals: Sequence[Arrival], cost: Cost) -> Served:
    """Serve `arrivals` on the virtual clock, by the engine's own scheduling, with steps as long as `cost` says."""
    kv, config = llm.engine.kv, llm.engine.scheduler.config
    settings = {each.name: getattr(config, each.name) for each in fields(SchedulerConfig)}
    run = simulate(arrivals, cost, num_blocks=kv.num_blocks, block_size=kv.block_size, prefix_cache="hash", **settings)
    seconds = run.seconds - min(each.time for each in arrivals)
    return Served(run.num_output_tokens / seconds, statistics.mean(each.to_first_token for each in run.times))


def main() -> int:
    """Measure as the arguments say; return 0 if both medians are within the limit."""
    parser = argparse.ArgumentParser(prog="simulator_accuracy", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"(default: {_ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    arguments = parser.parse_args()
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        parser.error(
            f"--json is {str(arguments.json)!r}, which cannot be written: give a file in a folder that is there"
        )
    os.environ.update(wait_shortly(os.environ))  # as `vllm-teach tune` does; read when torch is first imported
    try:
        accuracy = measure_accuracy(arguments.model, arguments.rounds)
    except VllmTeachError as error:
        print(error, file=sys.stderr)
        return 2
    print(accuracy)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(accuracy.to_json() | _provenance(), indent=1) + "\n", encoding="utf-8")
    return 0 if accuracy.passed() else 1


def _provenance() -> dict[str, object]:
    from vllm_teach.validation.gpu.machine import commit

    command = ["python", "-m", "vllm_teach.validation.simulator_accuracy", *sys.argv[1:]]
    threads = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", *WAIT_SHORTLY)}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": shlex.join(command), "commit": commit(), "date": now, "threads": threads}


if __name__ == "__main__":
    sys.exit(main())
