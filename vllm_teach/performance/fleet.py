"""Several engines behind a load balancer, on a virtual clock: who gets which request, and how long it then takes.

Each replica is the real scheduler and KV cache of `virtual_time`; only the seconds of a step are stated. So a policy
can be compared with another one on the same requests, exactly, which no two runs of real servers allow. Modelled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from vllm_teach.engine.events import EventLog
from vllm_teach.engine.field_checks import check_number, check_whole
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.engine.request import Sequence
from vllm_teach.engine.scheduler import Scheduler
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.performance.virtual_time import (
    Arrival,
    ChargedRunner,
    Cost,
    NoModel,
    RequestTimes,
    VirtualClock,
    make_sequence,
    quantile,
)

POLICIES = ("round_robin", "least_conn", "random")


@dataclass(frozen=True)
class Patience:
    """Seconds from its arrival after which a request is given up: while it still waits (`queue`), or at all (`total`).

    None is for ever. A replica notices between two steps, as an engine does.
    """

    queue: float | None = None
    total: float | None = None

    def __post_init__(self) -> None:
        for name in ("queue", "total"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, hint="use a number of seconds from 0, or None for ever")

    def is_over(self, waited: float, started: bool) -> bool:
        """Whether a request that came `waited` seconds ago is given up."""
        over_all = self.total is not None and waited > self.total
        return over_all or (not started and self.queue is not None and waited > self.queue)


@dataclass(frozen=True)
class FleetRun:
    """What became of each arrival, in order: its times (None if it was given up), and the replica that had it.

    `in_flight` has for each arrival how many requests each replica had when it came. `wasted_tokens` were computed for
    requests that were given up, `computed_tokens` in all. `seconds` is when the last replica was done.
    """

    times: tuple[RequestTimes | None, ...]
    replica: tuple[int, ...]
    in_flight: tuple[tuple[int, ...], ...]
    computed_tokens: int
    wasted_tokens: int
    seconds: float

    @property
    def answered(self) -> list[RequestTimes]:
        """The times of those that were answered to their end."""
        return [each for each in self.times if each is not None]

    @property
    def given_up(self) -> int:
        """How many were not."""
        return len(self.times) - len(self.answered)

    @property
    def throughput(self) -> float:
        """Output tokens of complete answers per virtual second."""
        return sum(len(each.tokens) for each in self.answered) / self.seconds

    def latency(self, share: float) -> float:
        """Return the latency that `share` (0 to 1) of the answered requests do not exceed."""
        return quantile([each.latency for each in self.answered], share)

    def to_first_token(self, share: float) -> float:
        """Return the time to the first token that `share` of the answered requests do not exceed."""
        return quantile([each.to_first_token for each in self.answered], share)


def choose_replica(policy: str, in_flight: Many[int], number: int, source: random.Random) -> int:
    """Return the index of the replica that gets the request `number` (from 0), by one of POLICIES.

    "least_conn" takes the one with the fewest in flight, and of several the next in turn, as nginx does.
    """
    count = len(in_flight)
    if policy == "round_robin":
        return number % count
    if policy == "random":
        return source.randrange(count)
    if policy == "least_conn":
        return min(range(count), key=lambda index: (in_flight[index], (index - number) % count))
    raise InvalidArgumentError(f"policy={policy!r} is not known: choose one of {', '.join(POLICIES)}.")


def simulate_fleet(
    arrivals: Many[Arrival],
    cost: Cost | Many[Cost],
    num_replicas: int,
    policy: str = "least_conn",
    *,
    patience: Patience | None = None,
    num_blocks: int = 100_000,
    block_size: int = 16,
    seed: int = 0,
    **config: Any,
) -> FleetRun:
    """Serve `arrivals` with `num_replicas` engines, each with so many blocks; each step takes what `cost` says.

    A list of costs has one for each replica. `config` has the fields of SchedulerConfig, `seed` is the policy
    "random"'s. With one replica and no patience the times are those of `virtual_time.simulate`. Raises what the
    scheduler raises, and InvalidArgumentError for no arrivals, no replicas, another number of costs, another policy.
    """
    check_whole("num_replicas", num_replicas, 1)
    costs = list(cost) if isinstance(cost, Many) else [cost] * num_replicas
    if not arrivals or len(costs) != num_replicas:
        raise InvalidArgumentError(
            f"{len(arrivals)} arrivals, num_replicas={num_replicas} and {len(costs)} costs make no fleet: give at "
            "least one request, and a cost for each replica."
        )
    replicas = [_Replica(each, patience or Patience(), num_blocks, block_size, config) for each in costs]
    source = random.Random(f"{seed} balancer")
    chosen = [0] * len(arrivals)
    seen: list[tuple[int, ...]] = [()] * len(arrivals)
    for number, index in enumerate(sorted(range(len(arrivals)), key=lambda i: arrivals[i].time)):
        for replica in replicas:
            replica.advance(arrivals[index].time)
        in_flight = tuple(len(replica.live) for replica in replicas)
        chosen[index], seen[index] = choose_replica(policy, in_flight, number, source), in_flight
        replicas[chosen[index]].add(index, arrivals[index])
    for replica in replicas:
        replica.advance(float("inf"))
    times: list[RequestTimes | None] = []
    for index, arrival in enumerate(arrivals):
        home = replicas[chosen[index]]
        times.append(RequestTimes(arrival.time, tuple(home.tokens[index])) if index not in home.lost else None)
    return FleetRun(
        tuple(times),
        tuple(chosen),
        tuple(seen),
        sum(replica.computed for replica in replicas),
        sum(replica.wasted for replica in replicas),
        max(replica.clock.now for replica in replicas),
    )


@dataclass
class _Live:
    """A request that has not ended: when it came, its sequence, and the tokens computed for it."""

    arrival: float
    sequence: Sequence
    computed: int = 0


@dataclass
class _Step:
    """A step that is being computed, until `end`."""

    plan: Plan
    result: StepResult
    start: float
    end: float = field(kw_only=True)


class _Replica:
    """One engine: it stands still at any time, also in the middle of a step, so that others can be looked at."""

    def __init__(
        self, cost: Cost, patience: Patience, num_blocks: int, block_size: int, config: dict[str, Any]
    ) -> None:
        self.clock, self.patience = VirtualClock(), patience
        self.live: dict[int, _Live] = {}
        self.tokens: dict[int, list[float]] = {}
        self.lost: set[int] = set()
        self.computed = self.wasted = 0
        events = EventLog(max_events=1000, clock=self.clock)
        kv = KVCacheManager(num_blocks, block_size, prefix_cache=None, record=events.record)
        self._scheduler = Scheduler(kv, SchedulerConfig(**config), events)
        self._runner = ChargedRunner(NoModel(), self.clock, cost, block_size)
        self._step: _Step | None = None

    def add(self, index: int, arrival: Arrival) -> None:
        """Queue a request, which takes part from the next step on."""
        if self._step is None:
            self.clock.now = max(self.clock.now, arrival.time)
        sequence = make_sequence(index, arrival)
        self.live[index], self.tokens[index] = _Live(arrival.time, sequence), []
        self._scheduler.add(sequence)

    def advance(self, until: float) -> None:
        """Compute all steps that end by `until`, and begin those that begin before."""
        while True:
            if self._step is None:
                if not self.live or self.clock.now >= until:
                    return
                self._begin()
            elif self._step.end <= until:
                self._end(self._step)
            else:
                return

    def _begin(self) -> None:
        start = self.clock.now
        for index in list(self.live):
            each = self.live[index]
            if self.patience.is_over(start - each.arrival, started=each.computed > 0):
                self._scheduler.finish(each.sequence, "abort")
                self.lost.add(index)
                self.wasted += self.live.pop(index).computed
        if not self.live:
            return
        plan = self._scheduler.schedule()
        for item in plan.items:
            self.live[item.sequence.seq_id].computed += item.num_tokens
        result = self._runner.execute(plan)
        self._step, self.clock.now = _Step(plan, result, start, end=self.clock.now), start

    def _end(self, step: _Step) -> None:
        self._step, self.clock.now = None, step.end
        for index in step.result.tokens:
            self.tokens[index].append(step.end)
        self._scheduler.update(step.plan, step.result)
        self._scheduler.observe(step.end - step.start)
        self.computed += step.plan.num_tokens
        self.live = {index: each for index, each in self.live.items() if not each.sequence.finished}
