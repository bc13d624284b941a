"""Who gives up blocks, how, and how they come back. Blocks of 4 tokens."""

import math

import pytest

from vllm_teach import SamplingParams
from vllm_teach.engine.events import Admitted, BroughtBack, Preempted
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.request import SequenceStatus
from vllm_teach.errors import InvalidArgumentError

SWAP_IS_CHEAP = PreemptionCosts(prefill_seconds_per_token=1.0, kv_bytes_per_token=1, swap_bytes_per_second=1e9)
SWAP_IS_DEAR = PreemptionCosts(prefill_seconds_per_token=1e-9, kv_bytes_per_token=1e9, swap_bytes_per_second=1)


def two_that_collide(scheduler, make_sequence, run_step):
    """Two sequences of 7 tokens in 4 blocks: both run until the first needs its third block, then one must go."""
    pair = [make_sequence(prompt=range(7), max_tokens=8) for _ in range(2)]
    for sequence in pair:
        scheduler.add(sequence)
    first, second = pair
    assert run_step(scheduler) == [(first, 0, 7), (second, 0, 7)]
    assert run_step(scheduler) == [(first, 7, 1), (second, 7, 1)]
    return pair


def test_the_last_that_came_is_preempted_and_recomputed(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=4)
    first, second = two_that_collide(scheduler, make_sequence, run_step)
    late = make_sequence(max_tokens=1)
    scheduler.add(late)
    plan = scheduler.schedule()
    assert [item.sequence for item in plan.items] == [first]
    assert plan.preempted == (second,)
    assert second.status is SequenceStatus.WAITING
    assert (second.num_computed, second.num_preemptions) == (0, 1)
    assert scheduler.waiting == [second, late]  # it came before `late`
    assert scheduler.events.of(Preempted) == [Preempted(second.seq_id, "recompute", 8, "recompute")]
    scheduler.finish(first, "abort")
    assert run_step(scheduler) == [(second, 0, 9), (late, 0, 3)]  # prompt and both tokens
    assert second.output_token_ids == [9, 9, 9]
    assert scheduler.events.of(Admitted)[-2] == Admitted(second.seq_id, 0, resumed=True)


def test_a_prefix_cache_brings_a_preempted_sequence_back_cheaply_and_counts_it_once(
    make_scheduler, make_sequence, run_step
) -> None:
    scheduler = make_scheduler(blocks=5, prefix_cache="hash")
    pair = [make_sequence(prompt=range(start, start + 8), max_tokens=8) for start in (0, 50)]
    for sequence in pair:
        scheduler.add(sequence)
    first, second = pair
    while not second.num_preemptions:
        run_step(scheduler)
    scheduler.finish(first, "abort")
    assert run_step(scheduler) == [(second, 8, 1)]
    assert second.num_cached_tokens == 0  # when it first ran
    assert scheduler.kv.usage().hit_queries == 16
    assert scheduler.kv.usage().hit_tokens == 0


def test_a_swapped_sequence_comes_back_before_others_are_admitted(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=4, host_blocks=2, preemption="swap")
    first, second = two_that_collide(scheduler, make_sequence, run_step)
    late = make_sequence(max_tokens=1)  # one block: it would fit at once
    scheduler.add(late)
    plan = scheduler.schedule()
    assert plan.preempted == (second,)
    assert [transfer.kind for transfer in plan.transfers] == ["swap_out"]
    assert scheduler.swapped == [second]
    assert second.num_computed == 8
    scheduler.schedule()
    assert scheduler.running == [first]
    scheduler.finish(first, "abort")
    assert run_step(scheduler) == [(second, 8, 1), (late, 0, 3)]
    assert scheduler.events.of(BroughtBack) == [BroughtBack(second.seq_id)]
    assert scheduler.kv.usage().host_blocks_used == 0


def test_a_swapped_sequence_comes_back_when_the_watermark_stays_free(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=9, host_blocks=9, preemption="swap", watermark=0.34)  # three blocks
    first, second, third = (make_sequence(prompt=range(4), max_tokens=n) for n in (12, 10, 20))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    for _ in range(9):
        assert len(run_step(scheduler)) == 3
    assert run_step(scheduler) == [(first, 12, 1), (second, 12, 1)]  # both take a fourth block
    assert second.finished
    # Five are free and `third` needs three, but three are to stay free beside others.
    assert run_step(scheduler) == [(first, 13, 1)]
    assert run_step(scheduler) == [(first, 14, 1)]
    assert run_step(scheduler) == [(third, 12, 1)]


def test_where_the_host_has_no_room_it_is_recomputed_and_the_event_says_so(
    make_scheduler, make_sequence, run_step
) -> None:
    scheduler = make_scheduler(blocks=4, host_blocks=1, preemption="swap")
    _, second = two_that_collide(scheduler, make_sequence, run_step)
    run_step(scheduler)
    assert second.status is SequenceStatus.WAITING
    assert scheduler.events.of(Preempted) == [Preempted(second.seq_id, "recompute", 8, wanted="swap")]


@pytest.mark.parametrize(("costs", "mode"), [(SWAP_IS_CHEAP, "swap"), (SWAP_IS_DEAR, "recompute")])
def test_auto_takes_what_the_cost_model_says(make_scheduler, make_sequence, run_step, costs, mode) -> None:
    scheduler = make_scheduler(blocks=4, host_blocks=2, preemption="auto", costs=costs)
    _, second = two_that_collide(scheduler, make_sequence, run_step)
    run_step(scheduler)
    assert scheduler.events.of(Preempted) == [Preempted(second.seq_id, mode, 8, mode)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_first_always_advances_and_takes_from_as_many_as_it_must(
    make_scheduler, make_sequence, run_step, preemption
) -> None:
    """The pool is as large as the first alone becomes."""
    scheduler = make_scheduler(blocks=6, host_blocks=9, preemption=preemption)
    first, *others = (make_sequence(prompt=range(n), max_tokens=16) for n in (8, 4, 4))
    for sequence in (first, *others):
        scheduler.add(sequence)
    while not first.finished:
        assert run_step(scheduler)[0][0] is first
    assert len(first.output_token_ids) == 16
    assert first.num_preemptions == 0
    assert all(sequence.num_preemptions for sequence in others)
    while scheduler.has_unfinished():
        assert run_step(scheduler)
    assert [len(sequence.output_token_ids) for sequence in others] == [16, 16]
    assert scheduler.kv.pool.num_held == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_fork_comes_back(make_scheduler, make_sequence, run_step, preemption) -> None:
    scheduler = make_scheduler(blocks=5, host_blocks=9, preemption=preemption)
    parent = make_sequence(prompt=range(6), n=3, max_tokens=9)
    family = [parent, *parent.forks]
    scheduler.add(parent)
    while scheduler.has_unfinished():
        assert run_step(scheduler)
    assert [len(sequence.output_token_ids) for sequence in family] == [9, 9, 9]
    assert sum(sequence.num_preemptions for sequence in family)
    assert scheduler.kv.pool.num_held == scheduler.kv.usage().host_blocks_used == 0


def test_the_token_of_a_sequence_preempted_in_the_next_step_is_kept(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=4)
    _, second = two_that_collide(scheduler, make_sequence, run_step)
    run_step(scheduler, token_id=7)
    assert second.output_token_ids == [9, 9]


def test_the_cost_model_by_hand() -> None:
    costs = PreemptionCosts(
        prefill_seconds_per_token=0.001,
        attention_seconds_per_pair=0.00002,
        kv_bytes_per_token=1000,
        swap_bytes_per_second=1e6,
    )
    assert costs.recompute_seconds(50) == pytest.approx(0.05 + 0.025)
    assert costs.swap_seconds(50) == pytest.approx(0.1)
    assert costs.crossover == pytest.approx(100)  # 0.1 + 0.1 s both
    assert [costs.cheaper(count) for count in (50, 99, 101)] == ["recompute", "recompute", "swap"]


def test_without_the_quadratic_part_one_of_the_two_is_always_cheaper() -> None:
    assert SWAP_IS_CHEAP.crossover == 0
    assert SWAP_IS_DEAR.crossover == math.inf


@pytest.mark.parametrize("value", [0, -1, math.nan, "fast", True])
def test_a_cost_that_is_no_positive_number_is_refused(value) -> None:
    with pytest.raises(InvalidArgumentError, match="swap_bytes_per_second="):
        PreemptionCosts(swap_bytes_per_second=value)


@pytest.mark.parametrize("placement", ["scattered", "contiguous", "prefer_contiguous"])
def test_no_step_is_empty_when_siblings_fill_the_pool_and_the_radix_cache_keeps_what_one_wrote(
    make_llm, assert_empty, placement
):
    """The preempted sibling's half block stays in the cache and in the other's table: that one writes all the same."""
    engine = make_llm(blocks=2, prefix_cache="radix", kv_placement=placement, max_num_seqs=2).engine
    engine.add_request([1, 2, 3, 4, 5, 6], SamplingParams(n=3, max_tokens=2, seed=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.last_plan.items
    assert engine.events.of(Preempted)
    assert_empty(engine)
