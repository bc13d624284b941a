"""A fleet on the virtual clock: one replica is `simulate`, and several differ only in who gets what."""

import random

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import LengthMix
from vllm_teach.performance.fleet import POLICIES, Patience, choose_replica, simulate_fleet
from vllm_teach.performance.virtual_time import Arrival, StepCost, simulate

COST = StepCost(step=1.0, token=0.1)
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


def traffic(count: int = 60, seed: int = 0) -> list[Arrival]:
    source, moment, made = random.Random(seed), 0.0, []
    for prompt, output in LengthMix("", 30, 10, max_prompt=100, max_total=200).draw(count, seed):
        made.append(Arrival(prompt, output, moment))
        moment += source.expovariate(0.3)
    return made


@pytest.mark.parametrize("blocks", [100_000, 40])
def test_one_replica_is_the_simulation(blocks: int) -> None:
    alone = simulate(traffic(), COST, num_blocks=blocks, **LIMITS)
    fleet = simulate_fleet(traffic(), COST, 1, num_blocks=blocks, **LIMITS)
    assert fleet.times == alone.times
    assert (fleet.computed_tokens, fleet.seconds) == (alone.num_computed, alone.seconds)
    assert fleet.given_up == fleet.wasted_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_each_replica_serves_its_share_as_if_it_were_alone(policy: str) -> None:
    arrivals = traffic()
    fleet = simulate_fleet(arrivals, COST, 3, policy, **LIMITS)
    for replica in range(3):
        mine = [index for index in range(len(arrivals)) if fleet.replica[index] == replica]
        alone = simulate([arrivals[index] for index in mine], COST, **LIMITS)
        assert [fleet.times[index] for index in mine] == list(alone.times)


def test_what_was_in_flight_is_what_had_come_and_not_ended() -> None:
    arrivals = traffic()
    fleet = simulate_fleet(arrivals, COST, 3, **LIMITS)
    for index, arrival in enumerate(arrivals):
        counts = [0, 0, 0]
        for other in range(index):
            ended = fleet.times[other].tokens[-1]
            counts[fleet.replica[other]] += ended > arrival.time
        assert fleet.in_flight[index] == tuple(counts)
        assert counts[fleet.replica[index]] == min(counts)


def test_the_policies_by_hand() -> None:
    source = random.Random(0)
    assert [choose_replica("round_robin", [9, 0, 0], number, source) for number in range(4)] == [0, 1, 2, 0]
    assert choose_replica("least_conn", [2, 1, 3], 0, source) == 1
    assert [choose_replica("least_conn", [1, 1, 1], number, source) for number in range(4)] == [0, 1, 2, 0]
    assert choose_replica("least_conn", [1, 1, 2], 2, source) == 0
    drawn = [choose_replica("random", [0] * 4, 0, source) for _ in range(400)]
    assert all(60 < drawn.count(replica) < 140 for replica in range(4))


def test_round_robin_gives_all_long_ones_to_one_where_every_second_is_long() -> None:
    arrivals = [Arrival(2, 40 if i % 2 == 0 else 2, time=3.0 * i) for i in range(20)]
    robin, least = (simulate_fleet(arrivals, COST, 2, name, **LIMITS) for name in ("round_robin", "least_conn"))
    assert {robin.replica[i] for i in range(0, 20, 2)} == {0}
    assert {least.replica[i] for i in range(0, 20, 2)} == {0, 1}
    assert least.to_first_token(1) < robin.to_first_token(1)


def test_a_limit_on_the_queue_gives_up_only_what_cost_nothing() -> None:
    arrivals = [Arrival(4, 20) for _ in range(8)]
    fleet = simulate_fleet(arrivals, COST, 1, patience=Patience(queue=5.0), max_num_seqs=2, max_num_batched_tokens=64)
    assert [each is None for each in fleet.times] == [False] * 2 + [True] * 6
    assert fleet.wasted_tokens == 0
    assert fleet.throughput == 40 / fleet.seconds


def test_a_limit_on_the_whole_wastes_what_was_computed() -> None:
    fleet = simulate_fleet([Arrival(4, 3), Arrival(4, 50)], COST, 1, patience=Patience(total=10.0), **LIMITS)
    assert fleet.given_up == 1
    assert fleet.times[0] is not None
    # A step takes at least 1.1 s: the second one is in nine of them before 10 s are over, and 4 tokens in the first.
    assert 10 <= fleet.wasted_tokens <= 13
    assert fleet.computed_tokens == fleet.wasted_tokens + 4 + 2


def test_replicas_may_have_costs_of_their_own() -> None:
    fleet = simulate_fleet([Arrival(4, 5), Arrival(4, 5)], [COST, StepCost(step=2.0, token=0.1)], 2, "round_robin")
    assert fleet.times[0].latency < fleet.times[1].latency


def test_any_object_that_tells_seconds_is_a_cost() -> None:
    class Constant:
        def seconds(self, plan, block_size: int) -> float:
            return 2.0

    fleet = simulate_fleet([Arrival(4, 3)], Constant(), 1)
    assert fleet.times[0].tokens == (2, 4, 6)


@pytest.mark.parametrize(
    ("arrivals", "cost", "count", "policy", "named"),
    [
        ([], COST, 1, "random", "0 arrivals"),
        ([Arrival(1, 1)], COST, 0, "random", "num_replicas=0"),
        ([Arrival(1, 1)], [COST], 2, "random", "1 costs"),
        ([Arrival(1, 1)], COST, 2, "best", "policy='best'"),
    ],
)
def test_what_is_no_fleet_is_refused(arrivals, cost, count, policy, named) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        simulate_fleet(arrivals, cost, count, policy)


@pytest.mark.parametrize("wrong", [{"queue": -1.0}, {"total": float("nan")}])
def test_patience_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}="):
        Patience(**wrong)


def test_half_a_replica_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"num_replicas=1\.5"):
        simulate_fleet([Arrival(1, 1)], StepCost(), 1.5)  # type: ignore[arg-type]
