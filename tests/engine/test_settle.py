"""What a computed step changes: tokens, siblings, ends; also if it breaks off or is told twice. Blocks of 4 tokens."""

import pytest

from vllm_teach.engine.events import Forked
from vllm_teach.engine.plan import StepResult
from vllm_teach.engine.request import SampledToken
from vllm_teach.errors import EngineError


def test_forks_branch_off_with_their_own_first_tokens(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    parent = make_sequence(prompt=range(6), n=3, max_tokens=3)
    family = [parent, *parent.forks]
    ids = [sequence.seq_id for sequence in family]
    scheduler.add(parent)
    assert run_step(scheduler) == [(parent, 0, 4)]
    assert run_step(scheduler, tokens=dict(zip(ids, (20, 21, 22), strict=True))) == [(parent, 4, 2)]
    assert [sequence.output_token_ids for sequence in family] == [[20], [21], [22]]
    assert parent.forks == []
    assert scheduler.running == family
    assert scheduler.kv.pool.num_held == 2  # all three share them
    plan = scheduler.schedule()
    assert [(item.start, item.num_tokens) for item in plan.items] == [(6, 1)] * 3
    # Two of the three copy the last block before they write into it; the first block stays shared.
    assert [transfer.kind for transfer in plan.transfers] == ["copy"] * len(plan.transfers)
    assert sum(len(transfer.pairs) for transfer in plan.transfers) == 2
    assert len({item.blocks[0] for item in plan.items}) == 1
    assert len({item.blocks[1] for item in plan.items}) == 3


def test_parent_and_forks_may_end_with_the_very_first_token(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler()
    parent = make_sequence(n=3, stop_ids=(0,), max_tokens=4)
    one, two = parent.forks
    scheduler.add(parent)
    run_step(scheduler, tokens={parent.seq_id: 0, one.seq_id: 0})
    assert [parent.finish_reason, one.finish_reason, two.finish_reason] == ["stop", "stop", None]
    assert scheduler.running == [two]
    assert run_step(scheduler) == [(two, 3, 1)]


def test_a_fork_without_a_place_waits_at_the_front(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_seqs=2, prefix_cache="hash")
    parent, other = make_sequence(prompt=range(9), n=3, max_tokens=2), make_sequence(max_tokens=2)
    one, two = parent.forks
    scheduler.add(parent)
    scheduler.add(other)
    assert run_step(scheduler) == [(parent, 0, 9), (other, 0, 3)]
    assert scheduler.running == [parent, other]
    assert scheduler.waiting == [one, two]
    assert scheduler.events.of(Forked) == [
        Forked(parent.seq_id, one.seq_id, queued=True),
        Forked(parent.seq_id, two.seq_id, queued=True),
    ]
    assert one.output_token_ids == two.output_token_ids == [9]
    run_step(scheduler)
    # They are computed again, but for the blocks of the prompt that the cache has.
    assert run_step(scheduler) == [(one, 8, 2), (two, 8, 2)]
    assert scheduler.kv.usage().hit_queries == 12  # the prompts of parent and other, once each


def test_a_fork_aborted_before_the_prompt_is_computed_is_dropped(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    parent = make_sequence(prompt=range(6), n=3)
    one, two = parent.forks
    scheduler.add(parent)
    run_step(scheduler)
    scheduler.finish(one, "abort")
    assert parent.forks == [two]
    run_step(scheduler)
    assert scheduler.running == [parent, two]
    assert one.output_token_ids == []


@pytest.mark.parametrize("steps", [0, 1])
def test_when_the_leader_is_aborted_the_next_sibling_computes_the_prompt(
    make_scheduler, make_sequence, run_step, steps
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, prefix_cache="hash")
    parent, other = make_sequence(prompt=range(6), n=3), make_sequence()
    one, two = parent.forks
    scheduler.add(parent)
    scheduler.add(other)
    for _ in range(steps):
        run_step(scheduler)
    scheduler.finish(parent, "abort")
    assert scheduler.waiting[:2] == [one, other]
    assert one.forks == [two]
    while not scheduler.running or one.in_prefill:
        run_step(scheduler)
    assert set(scheduler.running) >= {one, two}
    assert parent.output_token_ids == []
    assert scheduler.kv.usage().hit_queries == 6 + 3  # each prompt counts once


def test_an_abort_between_plan_and_update_is_kept(make_scheduler, make_sequence) -> None:
    scheduler = make_scheduler()
    sequence, other = make_sequence(), make_sequence()
    scheduler.add(sequence)
    scheduler.add(other)
    plan = scheduler.schedule()
    scheduler.finish(sequence, "abort")
    scheduler.update(plan, StepResult({sequence.seq_id: SampledToken(9), other.seq_id: SampledToken(9)}))
    assert sequence.output_token_ids == []
    assert other.output_token_ids == [9]


def test_the_same_update_twice_changes_nothing_more(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler()
    parent, ending = make_sequence(prompt=range(6), n=2, max_tokens=5), make_sequence(max_tokens=1)
    family = [parent, *parent.forks]
    scheduler.add(parent)
    scheduler.add(ending)
    plan = scheduler.schedule()
    result = StepResult({sequence.seq_id: SampledToken(9) for sequence in (*family, ending)})
    scheduler.update(plan, result)
    events = len(scheduler.events)
    scheduler.update(plan, result)
    assert [sequence.output_token_ids for sequence in (*family, ending)] == [[9]] * 3
    assert scheduler.running == family
    assert len(scheduler.events) == events
    assert run_step(scheduler) == [(sequence, 6, 1) for sequence in family]


@pytest.mark.parametrize("method", ["commit", "fork", "free"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("ends", [1, 4])
def test_an_update_that_breaks_off_in_the_cache_can_be_repeated(
    make_scheduler, make_sequence, run_step, monkeypatch, method, after, ends
) -> None:
    scheduler = make_scheduler()
    parent, other = make_sequence(prompt=range(6), n=3, stop_ids=(0,), max_tokens=5), make_sequence(max_tokens=ends)
    family = [parent, *parent.forks]
    scheduler.add(other)
    scheduler.add(parent)
    plan = scheduler.schedule()
    result = StepResult({sequence.seq_id: SampledToken(9) for sequence in (*family, other)})
    result.tokens[family[1].seq_id] = SampledToken(0)
    real = getattr(scheduler.kv, method)

    def interrupted(*args, **options):
        if after:
            real(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.kv, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.update(plan, result)
    scheduler.update(plan, result)
    assert [sequence.output_token_ids for sequence in (*family, other)] == [[9], [0], [9], [9]]
    assert family[1].finish_reason == "stop"
    assert scheduler.running == [*([] if ends == 1 else [other]), parent, family[2]]
    while scheduler.has_unfinished():
        run_step(scheduler)
    assert scheduler.kv.pool.num_held == 0


def test_a_token_lost_between_counting_and_drawing_is_drawn_in_the_next_step(
    make_scheduler, make_sequence, run_step
) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(prompt=range(6), max_tokens=5)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    with pytest.raises(KeyError):  # as an interrupt would: the prompt counts as computed, and there is no token
        scheduler.update(plan, StepResult())
    assert sequence.num_computed == 6
    assert run_step(scheduler) == [(sequence, 5, 1)]
    assert run_step(scheduler) == [(sequence, 6, 1)]


@pytest.mark.parametrize("applied", [False, True])
def test_a_step_that_breaks_off_is_planned_again_with_the_transfers_it_missed(
    make_scheduler, make_sequence, run_step, applied
) -> None:
    scheduler = make_scheduler()
    parent = make_sequence(prompt=range(6), n=2, max_tokens=4)
    scheduler.add(parent)
    run_step(scheduler)
    lost = scheduler.schedule()
    assert lost.transfers
    lost.num_applied = len(lost.transfers) if applied else 0  # by the runner, before it failed
    again = scheduler.schedule()
    assert again.transfers == (() if applied else lost.transfers)
    assert [(i.sequence, i.start, i.num_tokens) for i in again.items] == [
        (i.sequence, i.start, i.num_tokens) for i in lost.items
    ]
    assert again.step == lost.step + 1


def test_transfers_of_a_step_whose_execution_failed_come_again(make_scheduler, make_sequence, run_step) -> None:
    """Its sequences ended with it, but others may have been swapped out by it."""
    scheduler = make_scheduler()
    parent = make_sequence(prompt=range(6), n=2, max_tokens=4)
    scheduler.add(parent)
    run_step(scheduler)
    lost = scheduler.schedule()
    scheduler.update(lost, StepResult(errors={item.sequence.seq_id: EngineError("broken.") for item in lost.items}))
    assert not scheduler.has_unfinished()
    assert scheduler.schedule().transfers == lost.transfers


def test_prompt_logprobs_are_kept_by_position(make_scheduler, make_sequence) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = make_sequence(prompt=range(6), prompt_logprobs=1)
    scheduler.add(sequence)
    for rows in ([1, 2, 3, 4], [5]):
        plan = scheduler.schedule()
        entries = {sequence.seq_id: [{position: (-1.0, 1)} for position in rows]}
        tokens = {sequence.seq_id: SampledToken(9)} if plan.items[0].samples else {}
        for _ in range(2):
            scheduler.update(plan, StepResult(tokens, prompt_logprobs=entries))
    assert sequence.prompt_logprobs == [None, *({position: (-1.0, 1)} for position in range(1, 6))]


def test_blocks_that_no_later_query_sees_are_given_back(make_scheduler, make_sequence, run_step) -> None:
    """A window of 4 behind a sink of one block: three blocks do for any length."""
    scheduler = make_scheduler(unseen=lambda computed: range(1, max(1, (computed - 4) // 4)))
    sequence = make_sequence(prompt=range(20), max_tokens=40)
    scheduler.add(sequence)
    run_step(scheduler)
    assert scheduler.kv.pool.num_held == 2  # blocks 0 and 4 of 5
    while not sequence.finished:
        run_step(scheduler)
        assert scheduler.kv.pool.num_held <= 3
    assert scheduler.kv.pool.num_held == 0


@pytest.mark.parametrize("prompt", [3, 30])
def test_a_failed_sequence_ends_and_frees_and_the_others_go_on(make_scheduler, make_sequence, run_step, prompt) -> None:
    """With its forks, also if its prompt is not computed to the end."""
    scheduler = make_scheduler()
    good, bad = make_sequence(), make_sequence(prompt=range(prompt), n=2)
    fork = bad.forks[0]
    scheduler.add(good)
    scheduler.add(bad)
    run_step(scheduler, fail=[bad])
    for sequence in (bad, fork):
        assert isinstance(sequence.error, EngineError)
        assert sequence.finish_reason == "error"
    assert scheduler.running == [good]
    assert scheduler.kv.pool.num_held == 1


def test_what_a_failed_step_computed_is_nobodys_prefix(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(prefix_cache="hash")
    bad, good = (make_sequence(prompt=range(9), max_tokens=1) for _ in range(2))
    scheduler.add(bad)
    run_step(scheduler, fail=[bad])
    scheduler.add(good)
    assert run_step(scheduler) == [(good, 0, 9)]


def test_a_samplers_error_ends_one_of_several_completions(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler()
    parent = make_sequence(prompt=range(6), n=3)
    one, two = parent.forks
    scheduler.add(parent)
    plan = scheduler.schedule()
    errors = {parent.seq_id: EngineError("broken."), two.seq_id: EngineError("broken.")}
    scheduler.update(plan, StepResult({one.seq_id: SampledToken(9)}, errors))
    assert [sequence.finish_reason for sequence in (parent, one, two)] == ["error", None, "error"]
    assert run_step(scheduler) == [(one, 6, 1)]


def test_stop_tokens(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler()
    eos = make_sequence(stop_ids=(9,))
    named = make_sequence(stop_token_ids=[9])
    early = make_sequence(stop_ids=(9,), min_tokens=2, max_tokens=5)
    for sequence in (eos, named, early):
        scheduler.add(sequence)
    run_step(scheduler, token_id=9)
    assert (eos.finish_reason, eos.stop_reason) == ("stop", None)
    assert (named.finish_reason, named.stop_reason) == ("stop", 9)
    assert not early.finished
    run_step(scheduler, token_id=9)
    assert early.finish_reason == "stop"
    assert scheduler.kv.pool.num_held == 0
