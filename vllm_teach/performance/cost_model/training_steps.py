"""Measures steps of the real engine: what a cost model is fitted to.

A `Script` says which requests come when; its steps then always have the same plans, and each is timed in every round.
All scripts run in each round, in an order that turns, so that a slow minute falls on all of them; a step's time is the
median over the rounds. Steps in which the same sequences decode, one token after the other, are one point.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.request import Request
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.timing import Timing, check_calls


class Wave(NamedTuple):
    """`num_prompts` prompts of `length` tokens that come before step `step`, counted from 0."""

    step: int
    num_prompts: int
    length: int


@dataclass(frozen=True)
class Script:
    """Requests that come in waves; when all of them decode, they go on for `decode_steps` steps."""

    name: str
    waves: tuple[Wave, ...]
    decode_steps: int = 6

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache must hold, at most."""
        return sum(wave.num_prompts * (wave.length + self._num_steps) for wave in self.waves)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, at most."""
        return max(wave.length for wave in self.waves) + self._num_steps

    @property
    def _num_steps(self) -> int:
        return self.decode_steps + max(wave.step for wave in self.waves) + 64  # some for the prompts


@dataclass(frozen=True)
class TrainingPoint:
    """A step of `model` as it was planned in `script`, and its seconds."""

    model: str
    script: str
    shape: StepShape
    seconds: Timing


def _decode(count: int, length: int) -> Script:
    return Script(f"{count} decode after {length}", (Wave(0, count, length),))


def _prefill(length: int) -> Script:
    return Script(f"prompt of {length}", (Wave(0, 1, length),), decode_steps=2)


# Batches and contexts of decode steps; prompts, of which those above 2,048 tokens are computed in two chunks; and both.
SCRIPTS = (
    *(_decode(*each) for each in ((1, 32), (1, 1024), (2, 256), (4, 64), (4, 512), (8, 128), (12, 32), (16, 512))),
    *(_decode(*each) for each in ((24, 64), (32, 128), (48, 64), (64, 32), (64, 192))),
    *map(_prefill, (16, 48, 100, 256, 700, 1500, 3500)),
    Script("prompts among 16", (Wave(0, 16, 64), Wave(3, 1, 256), Wave(5, 1, 1024), Wave(7, 8, 32)), 2),
    Script("prompts among 48", (Wave(0, 48, 32), Wave(3, 1, 512), Wave(5, 4, 100), Wave(7, 1, 40)), 2),
    Script("prompts among 4", (Wave(0, 4, 256), Wave(3, 1, 128), Wave(5, 1, 20), Wave(7, 2, 400)), 2),
)
# A model without much to compute shows what calls cost.
TINY_SCRIPTS = (_decode(1, 32), _decode(16, 64), _decode(48, 64), _prefill(100), _prefill(350))


class StepMeasurement:
    """Times the steps of `scripts` on `llm`, which has nothing else to do, round by round; `model` is how to call it.

    Prompts are random and found in no cache; texts are made of what comes. Raises InvalidArgumentError for scripts that
    do not fit the engine.
    """

    def __init__(self, llm: LLM, model: str, scripts: Sequence[Script] = SCRIPTS) -> None:
        for script in scripts:
            _check_room(llm, script)
        self._llm, self._model, self._scripts = llm, model, scripts
        self._source = random.Random(0)
        self._timed: list[list[list[tuple[StepShape, float]]]] = [[] for _ in scripts]

    def run_round(self, announce: Callable[[str], object] = lambda name: None) -> None:
        """Run each script once, in the next order; `announce` is told each one's name before it runs."""
        order = list(range(len(self._scripts)))
        turn = len(self._timed[0]) % len(order)
        for index in order[turn:] + order[:turn]:
            announce(self._scripts[index].name)
            self._timed[index].append(list(_run(self._llm, self._scripts[index], self._source)))

    def points(self) -> list[TrainingPoint]:
        """Return the steps over all rounds. Raises EngineError when the engine planned the same script in two ways."""
        return [
            TrainingPoint(self._model, script.name, *point)
            for script, runs in zip(self._scripts, self._timed, strict=True)
            for point in _points(script, runs)
        ]


def measure_training_steps(
    llm: LLM,
    model: str,
    scripts: Sequence[Script] = SCRIPTS,
    rounds: int = 5,
    announce: Callable[[str], object] = lambda name: None,
) -> list[TrainingPoint]:
    """Return the steps of `scripts` over `rounds` rounds; see `StepMeasurement`, also for what it raises."""
    check_calls("rounds", rounds, 1, "measures nothing")
    measurement = StepMeasurement(llm, model, scripts)
    for _ in range(rounds):
        measurement.run_round(announce)
    return measurement.points()


def _check_room(llm: LLM, script: Script) -> None:
    engine = llm.engine
    most = sum(wave.num_prompts for wave in script.waves)
    slots = (engine.kv.num_blocks - most) * engine.kv.block_size  # a block of each sequence may be all but empty
    if script.longest > engine.max_model_len or script.num_tokens > slots or most > engine.config.max_num_seqs:
        raise InvalidArgumentError(
            f"script {script.name!r} needs {script.num_tokens:,} slots, {script.longest:,} of them for one of its "
            f"{most} sequences: give the engine a larger kv_cache_memory_bytes, or leave the script out."
        )


def _run(llm: LLM, script: Script, source: random.Random) -> Iterator[tuple[StepShape, float]]:
    """Yield the shape and the seconds of each step; the requests are aborted at the end."""
    engine, names = llm.engine, []
    requests: list[Request] = []
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    last, left = max(wave.step for wave in script.waves), script.decode_steps
    engine.reset_prefix_cache()
    try:
        for step in itertools.count():
            for wave in script.waves:
                for _ in range(wave.num_prompts if wave.step == step else 0):
                    prompt = [source.randrange(llm.model.config.vocab_size) for _ in range(wave.length)]
                    names.append(engine.add_request({"prompt_token_ids": prompt}, params))
                    requests.append(engine.get_request(names[-1]))
            started = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - started
            for request in requests:
                if request.error is not None:
                    raise request.error
            yield StepShape.of(engine.last_plan.items, (), llm.model.config.sliding_window), seconds
            if step >= last and all(request.sequences[0].output_token_ids for request in requests):
                left -= 1
                if left < 0:
                    return
    finally:
        for name in names:
            engine.abort(name)


def _points(script: Script, runs: list[list[tuple[StepShape, float]]]) -> Iterator[tuple[StepShape, Timing]]:
    """Yield a point for each step with a chunk, and one, that in the middle, for each run of decode steps."""
    shapes = [[shape for shape, _ in run] for run in runs]
    if any(each != shapes[0] for each in shapes):
        raise EngineError(f"the engine planned the steps of {script.name!r} in two ways: measure on an idle engine.")
    alike = itertools.groupby(
        range(len(shapes[0])), key=lambda step: step if shapes[0][step].chunks else -shapes[0][step].singles
    )
    for _, steps in alike:
        chosen = list(steps)
        seconds = [run[step][1] for run in runs for step in chosen]
        yield shapes[0][chosen[len(chosen) // 2]], Timing.of(seconds)
