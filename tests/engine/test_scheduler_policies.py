"""Who goes first, and what static batching and prefill-first do instead of continuous batching."""

import random

import pytest

from vllm_teach.engine.events import Admitted


def test_priority_goes_before_arrival(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    order = [make_sequence(priority=priority, max_tokens=1) for priority in (5, 0, 5, -1)]
    for sequence in order:
        scheduler.add(sequence)
    ended = []
    while scheduler.has_unfinished():
        ended += [sequence for sequence, _, _ in run_step(scheduler)]
    assert ended == [order[3], order[1], order[0], order[2]]


def test_fcfs_knows_no_priority(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make_sequence(priority=5, max_tokens=1), make_sequence(priority=0, max_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    assert run_step(scheduler) == [(first, 0, 3)]


def test_under_priority_the_least_important_gives_up_its_blocks(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(policy="priority", blocks=5)
    low, high = (make_sequence(prompt=range(8), max_tokens=6, priority=priority) for priority in (1, 0))
    scheduler.add(low)
    assert run_step(scheduler) == [(low, 0, 8)]
    scheduler.add(high)
    assert run_step(scheduler) == [(low, 8, 1), (high, 0, 8)]  # now all blocks are in use
    assert run_step(scheduler) == [(high, 8, 1)]
    assert scheduler.waiting == [low]


def test_nobody_is_admitted_in_a_step_that_preempts(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(policy="priority", blocks=5)
    low, high = (make_sequence(prompt=range(8), max_tokens=6, priority=priority) for priority in (1, 0))
    scheduler.add(low)
    scheduler.add(high)
    run_step(scheduler)
    urgent = make_sequence(prompt=range(2), max_tokens=2, priority=-1)
    scheduler.add(urgent)
    # The third block of `high` is the fifth; `low` lacks one and gives up its two, of which `urgent` needs one.
    assert run_step(scheduler) == [(high, 8, 1)]
    assert run_step(scheduler) == [(high, 9, 1), (urgent, 0, 2)]
    assert scheduler.waiting == [low]


def test_a_static_batch_begins_when_the_last_one_has_ended(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(batching="static", max_num_seqs=2)
    short, long, third, fourth = (make_sequence(max_tokens=n) for n in (1, 4, 2, 1))
    for sequence in (short, long, third, fourth):
        scheduler.add(sequence)
    steps = []
    while scheduler.has_unfinished():
        steps.append([sequence for sequence, _, _ in run_step(scheduler)])
    # The place of `short` stays empty until `long` is done.
    assert steps == [[short, long], [long], [long], [long], [third, fourth], [third]]


def test_a_static_batch_that_lacks_only_tokens_goes_on_forming(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(batching="static", max_num_batched_tokens=8)
    sequences = [make_sequence(prompt=range(6), max_tokens=9) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    one, two, three = sequences
    assert run_step(scheduler) == [(one, 0, 6), (two, 0, 2)]
    assert run_step(scheduler) == [(one, 6, 1), (two, 2, 4), (three, 0, 3)]
    late = make_sequence()
    assert run_step(scheduler) == [(one, 7, 1), (two, 6, 1), (three, 3, 3)]
    scheduler.add(late)  # there is a fourth place, but the batch is closed
    assert run_step(scheduler) == [(one, 8, 1), (two, 7, 1), (three, 6, 1)]


@pytest.mark.parametrize("late", [1, 3])
def test_prefill_first_makes_steps_of_one_kind(make_scheduler, make_sequence, run_step, late) -> None:
    scheduler = make_scheduler(batching="prefill_first")
    first, second = make_sequence(prompt=range(5), max_tokens=6), make_sequence(prompt=range(30), max_tokens=6)
    scheduler.add(first)
    assert run_step(scheduler) == [(first, 0, 5)]
    for step in range(1, late):
        assert run_step(scheduler) == [(first, 4 + step, 1)]
    scheduler.add(second)
    # The prompt is computed whole, beyond the budget of 20, and `first` stands still meanwhile.
    assert run_step(scheduler) == [(second, 0, 30)]
    assert run_step(scheduler) == [(first, 4 + late, 1), (second, 30, 1)]


@pytest.mark.parametrize("batching", ["continuous", "static", "prefill_first"])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_200_requests_at_once_in_a_cache_for_8_all_end_and_were_admitted_in_order(
    make_scheduler, make_sequence, run_step, batching, preemption
) -> None:
    scheduler = make_scheduler(
        blocks=8 * 8,
        host_blocks=40,
        prefix_cache="hash",
        max_num_seqs=32,
        max_num_batched_tokens=64,
        batching=batching,
        preemption=preemption,
    )
    chance = random.Random(0)
    sequences = [
        make_sequence(prompt=range(chance.randint(1, 24)), max_tokens=chance.randint(1, 8)) for _ in range(200)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(3000):
        if not scheduler.has_unfinished():
            break
        run_step(scheduler)
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 200
    first = [event.seq_id for event in scheduler.events.of(Admitted) if not event.resumed]
    assert first == [sequence.seq_id for sequence in sequences]
    assert scheduler.kv.pool.num_held == scheduler.kv.usage().host_blocks_used == 0
