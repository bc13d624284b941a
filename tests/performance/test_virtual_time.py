"""The real scheduler on a virtual clock: its seconds are arithmetic, its plans the engine's."""

import math

import pytest

from vllm_teach.engine.events import Admitted, Arrived, Preempted
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.virtual_time import LATEST, Arrival, StepCost, put_on_virtual_time, quantile, simulate

COST = StepCost(step=1.0, token=0.1)


def test_one_request_by_hand() -> None:
    run = simulate([Arrival(3, 3)], COST)
    (times,) = run.times
    assert times.tokens == pytest.approx((1.3, 2.4, 3.5))  # 3 tokens, then 1 and 1
    assert times.to_first_token == pytest.approx(1.3)
    assert times.gaps == pytest.approx((1.1, 1.1))
    assert (run.num_steps, run.num_computed, run.num_output_tokens) == (3, 5, 3)
    assert run.throughput == pytest.approx(3 / 3.5)


def test_pairs_and_swapped_slots_are_charged() -> None:
    pairs = simulate([Arrival(4, 2)], StepCost(step=0.0, token=0.0, pair=1.0))
    assert pairs.seconds == 1 + 2 + 3 + 4 + 5
    pool = {"num_blocks": 4, "block_size": 4, "num_host_blocks": 4, "preemption": "swap", "watermark": 0.0}
    cheap = simulate([Arrival(4, 6), Arrival(4, 6)], StepCost(step=1.0, token=0.0), **pool)
    dear = simulate([Arrival(4, 6), Arrival(4, 6)], StepCost(step=1.0, token=0.0, swapped_token=0.5), **pool)
    usage = dear.kv.usage()
    assert usage.swapped_out == usage.swapped_in > 0
    assert dear.seconds - cheap.seconds == pytest.approx(0.5 * 4 * (usage.swapped_out + usage.swapped_in))
    assert 0 < dear.peak_host_blocks <= 4


def test_a_request_that_comes_during_a_step_arrives_then_and_runs_in_the_next() -> None:
    run = simulate([Arrival(10, 2), Arrival(2, 1, time=0.5)], COST)
    arrived = [entry.time for entry in run.events if isinstance(entry.event, Arrived)]
    assert arrived == [0.0, 0.5]
    assert run.times[0].tokens == pytest.approx((2.0, 3.3))  # the second step has 1 + 2 tokens
    assert run.times[1].to_first_token == pytest.approx(2.8)


def test_the_clock_jumps_over_an_idle_time_and_order_of_the_list_does_not_matter() -> None:
    run = simulate([Arrival(1, 1, time=100.0), Arrival(1, 1)], COST)
    assert run.times[1].tokens == pytest.approx((1.1,))
    assert run.times[0].tokens == pytest.approx((101.1,))


def test_everyone_gets_all_tokens_under_preemption_and_nothing_stays_held() -> None:
    arrivals = [Arrival(5 + i, 12, time=0.1 * i) for i in range(9)]
    run = simulate(
        arrivals, COST, num_blocks=12, block_size=4, max_num_batched_tokens=16, max_num_seqs=8, watermark=0.0
    )
    assert [len(times.tokens) for times in run.times] == [12] * 9
    assert run.num_preemptions == len(run.events.of(Preempted)) > 0
    assert run.num_computed > sum(a.prompt_len + a.output_len - 1 for a in arrivals)
    assert run.kv.usage().held_blocks == 0


def test_the_target_is_told_the_virtual_seconds() -> None:
    arrivals = [Arrival(200, 20, time=0.01 * i) for i in range(10)]
    free = simulate(arrivals, StepCost(), max_num_batched_tokens=512)
    held = simulate(arrivals, StepCost(), max_num_batched_tokens=512, target_inter_token_latency=0.02)
    late = [sum(gap > 0.025 for times in run.times for gap in times.gaps) for run in (free, held)]
    assert late[1] < late[0]  # the first late step teaches it
    assert min(step.token_budget for step in held.steps) < 512


def test_an_engine_keeps_its_tokens_and_tells_virtual_times() -> None:
    llm = LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=8)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ids = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    llm.engine.events.clear()
    llm.engine.reset_prefix_cache()
    clock = put_on_virtual_time(llm.engine, COST)
    assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == ids
    assert clock.now == pytest.approx(3.5)
    assert [entry.time for entry in llm.engine.events][-1] == pytest.approx(3.5)


def test_quantile_is_the_nearest_rank() -> None:
    values = [30.0, 10.0, 20.0, 40.0]
    assert [quantile(values, share) for share in (0, 0.25, 0.5, 0.51, 1)] == [10, 10, 20, 30, 40]
    with pytest.raises(InvalidArgumentError, match="of 0 values"):
        quantile([], 0.5)
    with pytest.raises(InvalidArgumentError, match=r"share=1\.5"):
        quantile(values, 1.5)


@pytest.mark.parametrize("name", ["step", "token", "pair", "swapped_token"])
def test_a_cost_is_not_negative(name) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        StepCost(**{name: -1.0})


def test_prompts_of_one_group_find_their_prefix_in_the_cache() -> None:
    arrivals = [Arrival(12, 1, time=10.0 * i, prefix_len=8, prefix_group=i // 2) for i in range(4)]
    run = simulate(arrivals, COST, block_size=4, prefix_cache="hash")
    assert [each.num_cached_tokens for each in run.events.of(Admitted)] == [0, 8, 0, 8]
    assert simulate(arrivals, COST, block_size=4).num_computed - run.num_computed == 16


def test_eviction_and_placement_are_the_caches() -> None:
    arrivals = [Arrival(12, 1, time=10.0 * i, prefix_len=8, prefix_group=i % 2) for i in range(8)]
    shared = {"block_size": 4, "num_blocks": 5, "prefix_cache": "hash"}
    kept, forgotten = (simulate(arrivals, COST, **shared, eviction=name).num_computed for name in ("lru", "none"))
    assert kept < forgotten == 8 * 12
    with pytest.raises(InvalidArgumentError, match="placement='anywhere'"):
        simulate(arrivals, COST, placement="anywhere")


def test_each_step_is_watched_before_its_results_are_known() -> None:
    seen = []

    def watch(start, end, plan, scheduler) -> None:
        seen.append((start, end, plan.num_tokens, scheduler.kv.pool.num_held, scheduler.has_unfinished()))

    run = simulate([Arrival(3, 2), Arrival(20, 1, time=50.0)], StepCost(step=1.0, token=0.0), watch=watch)
    assert seen == [(0, 1, 3, 1, True), (1, 2, 1, 1, True), (50, 51, 20, 2, True)]
    assert run.num_steps == len(seen)


def test_what_is_kept_of_the_events_changes_nothing_else() -> None:
    arrivals = [Arrival(5 + i, 12, time=0.1 * i) for i in range(9)]
    pool = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, "watermark": 0.0}
    whole, short = simulate(arrivals, COST, **pool), simulate(arrivals, COST, **pool, max_events=5)
    assert (len(short.events), short.times, short.num_preemptions) == (5, whole.times, whole.num_preemptions)


@pytest.mark.parametrize("field", ["prompt_len", "output_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_length_is_a_whole_number_from_one(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        Arrival(**{"prompt_len": 1, "output_len": 1, field: value})


def test_nothing_to_simulate() -> None:
    with pytest.raises(InvalidArgumentError, match="arrivals is empty"):
        simulate([], COST)


def test_a_second_still_has_its_parts_at_the_latest_time() -> None:
    first, late = (simulate([Arrival(4, 3, time)], StepCost(1e-3, 1e-4)).times[0] for time in (0.0, LATEST))
    assert late.to_first_token == pytest.approx(first.to_first_token, abs=1e-6)
    assert late.gaps == pytest.approx(first.gaps, abs=1e-6)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_time_that_does_not_go_forward_is_refused(seconds: float) -> None:
    class Wrong:
        def seconds(self, plan: object, block_size: int) -> float:
            return seconds

    with pytest.raises(InvalidArgumentError, match=r"gives a step (-1\.0|nan|inf) seconds"):
        simulate([Arrival(4, 2)], Wrong())


def test_a_run_without_time_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="step, token and pair are all 0"):
        StepCost(step=0.0, token=0.0, swapped_token=1.0)
