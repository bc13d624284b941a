"""The real scheduler on a virtual clock: what would happen if a step took as long as a stated cost says. Modelled.

Only the runner is replaced. The plans, the blocks and the events are those of `engine.Scheduler` and
`kvcache.KVCacheManager`; the seconds are arithmetic, so two runs are equal on every machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from vllm_teach.engine.events import EventLog, StepEnded
from vllm_teach.engine.field_checks import check_number, check_whole
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.engine.request import SampledToken, Sequence
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Scheduler
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.manager import KVCacheManager

if TYPE_CHECKING:
    from vllm_teach.engine.llm_engine import LLMEngine


# Seconds, 30 years: up to here a float tells tenths of a microsecond apart. Later, steps would seem to take no time.
LATEST = 1e9


class VirtualClock:
    """Tells `now`, in seconds, until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the virtual time."""
        return self.now


class Cost(Protocol):
    """Says how long a step takes."""

    def seconds(self, plan: Plan, block_size: int) -> float:
        """Return the modelled seconds of `plan`, of a cache with blocks of `block_size` tokens."""


@dataclass(frozen=True)
class StepCost:
    """The modelled seconds of a step: `step` whatever it does, `token` for each token, `pair` for each pair of a query
    and a key it sees, and `swapped_token` for each slot that a swap moves, one way.

    `step` is above all reading the weights, which all tokens of a step share; that is why batches pay.
    """

    step: float = 10e-3
    token: float = 0.1e-3
    pair: float = 0.0
    swapped_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step", "token", "pair", "swapped_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidArgumentError(f"{name}={value!r} is no cost: use a number of seconds from 0.")
        if not (self.step or self.token or self.pair):
            raise InvalidArgumentError("step, token and pair are all 0, so that a run takes no time: give one of them.")

    def seconds(self, plan: Plan, block_size: int) -> float:
        """Return the modelled seconds of `plan`."""
        pairs = sum(i.num_tokens * i.start + i.num_tokens * (i.num_tokens + 1) // 2 for i in plan.items)
        moved = sum(len(each.pairs) for each in plan.transfers if each.kind in ("swap_out", "swap_in")) * block_size
        return self.step + plan.num_tokens * self.token + pairs * self.pair + moved * self.swapped_token


class _Runner(Protocol):
    def execute(self, plan: Plan) -> StepResult: ...


class ChargedRunner:
    """Lets `runner` compute a plan, and moves `clock` by what `cost` says it takes. It must not go back."""

    def __init__(self, runner: _Runner, clock: VirtualClock, cost: Cost, block_size: int) -> None:
        self._runner, self._clock, self._cost, self._block_size = runner, clock, cost, block_size

    def execute(self, plan: Plan) -> StepResult:
        """Compute and charge."""
        result = self._runner.execute(plan)
        seconds = self._cost.seconds(plan, self._block_size)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidArgumentError(f"cost={self._cost!r} gives a step {seconds!r} seconds: use one with 0 or more.")
        self._clock.now += seconds
        return result


def put_on_virtual_time(engine: LLMEngine, cost: Cost) -> VirtualClock:
    """Let `engine` go on as it is, but tell its events' times by a virtual clock, which is returned.

    The tokens stay real, the model's. Changes `engine.runner` and the clock of `engine.events`; only the events' times
    are modelled, not those in a request's metrics.
    """
    clock = VirtualClock()
    engine.events.clock = clock
    engine.runner = ChargedRunner(engine.runner, clock, cost, engine.kv.block_size)  # type: ignore[assignment]
    return clock


@dataclass(frozen=True)
class Arrival:
    """A request that comes at `time` (virtual seconds) with so many tokens in its prompt and, later, its output.

    The first `prefix_len` tokens of its prompt, fewer than all, are those of the others of the same `prefix_group`.
    Raises InvalidArgumentError for what is no length, and for a `time` beyond LATEST.
    """

    prompt_len: int
    output_len: int
    time: float = 0.0
    priority: int = 0
    prefix_len: int = 0
    prefix_group: int = 0

    def __post_init__(self) -> None:
        check_whole("prompt_len", self.prompt_len, 1)
        check_whole("output_len", self.output_len, 1)
        check_number("time", self.time, 0, LATEST, hint=f"use a number of seconds from 0 to {LATEST:g}")
        hint = f"use 0 to prompt_len - 1, which is {self.prompt_len - 1}"
        check_whole("prefix_len", self.prefix_len, 0, self.prompt_len - 1, hint=hint)
        check_whole("prefix_group", self.prefix_group, 0)


@dataclass(frozen=True)
class RequestTimes:
    """When a request arrived and when each of its tokens came, in virtual seconds."""

    arrival: float
    tokens: tuple[float, ...]

    @property
    def to_first_token(self) -> float:
        """Seconds from arrival to the first token (TTFT)."""
        return self.tokens[0] - self.arrival

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token."""
        return self.tokens[-1] - self.arrival

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between one token and the next (ITL)."""
        return tuple(after - before for before, after in pairwise(self.tokens))


@dataclass(frozen=True)
class Simulation:
    """What happened, in virtual time: events, a RequestTimes for each arrival in order, and the cache at the end.

    `peak_host_blocks` is the most host blocks that were in use after a step, `num_computed` all tokens of all steps,
    `num_preemptions` how often a sequence lost its blocks.
    """

    events: EventLog
    times: tuple[RequestTimes, ...]
    kv: KVCacheManager
    seconds: float
    num_steps: int
    num_computed: int
    num_output_tokens: int
    peak_host_blocks: int
    num_preemptions: int

    @property
    def throughput(self) -> float:
        """Output tokens per virtual second."""
        return self.num_output_tokens / self.seconds

    def to_first_token(self, share: float) -> float:
        """Return the TTFT that `share` (0 to 1) of the requests do not exceed."""
        return quantile([each.to_first_token for each in self.times], share)

    def latency(self, share: float) -> float:
        """Return the latency that `share` of the requests do not exceed."""
        return quantile([each.latency for each in self.times], share)

    def gap(self, share: float) -> float:
        """Return the time between two tokens of a request that `share` of all of them do not exceed."""
        return quantile([gap for each in self.times for gap in each.gaps], share)

    @property
    def steps(self) -> list[StepEnded]:
        """What each step ended with."""
        return self.events.of(StepEnded)


def quantile(values: Many[float], share: float) -> float:
    """Return the least of `values` that `share` (0 to 1) of them do not exceed: the nearest-rank quantile.

    Raises InvalidArgumentError for no values or a share that is none.
    """
    if not values or not 0 <= share <= 1:
        raise InvalidArgumentError(f"share={share!r} of {len(values)} values is nothing: use 0 to 1, and some values.")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Watch(Protocol):
    """Looks at each step of a simulation."""

    def __call__(self, start: float, end: float, plan: Plan, scheduler: Scheduler) -> None:
        """`plan` was computed from `start` to `end`; `scheduler` does not have its results yet."""


def simulate(
    arrivals: Many[Arrival],
    cost: Cost,
    *,
    num_blocks: int = 100_000,
    block_size: int = 16,
    num_host_blocks: int = 0,
    prefix_cache: str | None = None,
    eviction: str = "lru",
    placement: str = "scattered",
    max_events: int | None = None,
    watch: Watch | None = None,
    **config: Any,
) -> Simulation:
    """Serve `arrivals` with the real scheduler and cache, each step taking what `cost` says.

    The cache is a KVCacheManager's, and `config` has the fields of SchedulerConfig. `watch` is called for each step; of
    the events the newest `max_events` are kept, or all. Prompts differ in the first token behind their shared prefix,
    and every output has its full length. Raises what the scheduler raises, and InvalidArgumentError for no arrivals.
    """
    if not arrivals:
        raise InvalidArgumentError("arrivals is empty: give at least one request.")
    clock = VirtualClock()
    events = EventLog(clock=clock, max_events=max_events)
    kv = KVCacheManager(
        num_blocks,
        block_size,
        prefix_cache=prefix_cache,
        eviction=eviction,
        placement=placement,
        num_host_blocks=num_host_blocks,
        record=events.record,
    )
    scheduler = Scheduler(kv, SchedulerConfig(**config), events)
    runner = ChargedRunner(NoModel(), clock, cost, block_size)
    coming = deque(sorted(range(len(arrivals)), key=lambda index: arrivals[index].time))
    times: list[list[float]] = [[] for _ in arrivals]
    computed = peak = 0
    usage = kv.usage()

    def arrive(until: float) -> None:
        while coming and arrivals[coming[0]].time <= until:
            index = coming.popleft()
            clock.now = max(clock.now, arrivals[index].time)
            scheduler.add(make_sequence(index, arrivals[index]))

    while coming or scheduler.has_unfinished():
        if not scheduler.has_unfinished():
            arrive(max(clock.now, arrivals[coming[0]].time))
        plan = scheduler.schedule()
        start = clock.now
        result = runner.execute(plan)
        end, clock.now = clock.now, start
        arrive(end)  # those that come while the step is computed
        clock.now = end
        for seq_id in result.tokens:
            times[seq_id].append(end)
        if watch is not None:
            watch(start, end, plan, scheduler)
        scheduler.update(plan, result)
        scheduler.observe(end - start)
        computed += plan.num_tokens
        peak = max(peak, kv.renew(usage).host_blocks_used) if num_host_blocks else 0
    told = tuple(RequestTimes(a.time, tuple(t)) for a, t in zip(arrivals, times, strict=True))
    outputs, preempted = sum(map(len, times)), scheduler.preemptions.total()
    return Simulation(events, told, kv, clock.now, events.step, computed, outputs, peak, preempted)


class NoModel:
    """A runner whose every token is 0."""

    def execute(self, plan: Plan) -> StepResult:
        """Compute nothing."""
        plan.num_applied = len(plan.transfers)
        return StepResult({item.sequence.seq_id: SampledToken(0) for item in plan.items if item.samples})


def make_sequence(index: int, arrival: Arrival) -> Sequence:
    """Return the sequence `index` of such a request; no other's prompt has the first token behind its shared prefix."""
    params = SamplingParams(max_tokens=arrival.output_len, ignore_eos=True)
    shared = (-1 - arrival.prefix_group,) * arrival.prefix_len
    return Sequence(
        seq_id=index,
        index=0,
        prompt_token_ids=(*shared, index + 1, *[0] * (arrival.prompt_len - arrival.prefix_len - 1)),
        params=params,
        max_total_tokens=arrival.prompt_len + arrival.output_len,
        stop_ids=frozenset(),
        random_source=str(index),
        priority=arrival.priority,
    )
