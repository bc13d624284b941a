"""Scenarios by hand: blocks of 4 tokens; a step is written as (sequence, start, number of tokens)."""

import pytest

from vllm_teach.engine.request import SequenceStatus
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import InvalidArgumentError, PromptTooLongError


def test_prefill_and_decode_share_a_step(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(prompt=range(5), max_tokens=3), make_sequence(prompt=range(7), max_tokens=3)
    scheduler.add(first)
    assert run_step(scheduler) == [(first, 0, 5)]
    scheduler.add(second)
    plan = scheduler.schedule()
    assert (plan.num_tokens, plan.num_prefill_tokens, plan.num_decode_tokens) == (8, 7, 1)
    assert [(item.start, item.num_tokens, item.is_decode, item.samples, item.context_len) for item in plan.items] == [
        (5, 1, True, True, 6),
        (0, 7, False, True, 7),
    ]
    assert [len(item.blocks) for item in plan.items] == [2, 2]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, long, last = (make_sequence(prompt=range(n), max_tokens=9) for n in (3, 19, 2))
    for sequence in (first, long, last):
        scheduler.add(sequence)
    assert run_step(scheduler) == [(first, 0, 3), (long, 0, 5)]
    assert run_step(scheduler) == [(first, 3, 1), (long, 5, 7)]
    assert long.output_token_ids == []
    assert run_step(scheduler) == [(first, 4, 1), (long, 12, 7)]
    assert long.output_token_ids == [9]
    assert run_step(scheduler) == [(first, 5, 1), (long, 19, 1), (last, 0, 2)]


def test_a_threshold_leaves_long_prompts_less(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=6)
    long, short = (make_sequence(prompt=range(n), max_tokens=2) for n in (14, 5))
    scheduler.add(long)
    scheduler.add(short)
    assert run_step(scheduler) == [(long, 0, 6), (short, 0, 5)]
    assert run_step(scheduler) == [(long, 6, 6), (short, 5, 1)]
    assert run_step(scheduler) == [(long, 12, 2)]


def test_decodes_behind_a_long_prompt_in_order_keep_their_tokens(make_scheduler, make_sequence, run_step) -> None:
    """The prompt came first and takes several steps; those that came later decode meanwhile."""
    scheduler = make_scheduler(max_num_batched_tokens=7, long_prefill_token_threshold=5)
    long, short = (make_sequence(prompt=range(n), max_tokens=9) for n in (20, 2))
    scheduler.add(long)
    scheduler.add(short)
    assert run_step(scheduler) == [(long, 0, 5), (short, 0, 2)]
    assert run_step(scheduler) == [(long, 5, 5), (short, 2, 1)]


def test_whole_prompts_run_within_the_budget_and_a_longer_one_as_the_only_one(
    make_scheduler, make_sequence, run_step
) -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False)
    prompts = [make_sequence(prompt=range(n), max_tokens=1) for n in (9, 9, 9, 45, 3)]
    for sequence in prompts:
        scheduler.add(sequence)
    assert [[n for _, _, n in run_step(scheduler)] for _ in range(4)] == [[9, 9], [9], [45], [3]]
    decoding = [make_sequence(prompt=range(9), max_tokens=9) for _ in range(3)]
    for sequence in decoding:
        scheduler.add(sequence)
    assert [[n for _, _, n in run_step(scheduler)] for _ in range(2)] == [[9, 9], [1, 1, 9]]


def test_the_place_of_an_ended_sequence_is_taken_in_the_next_step(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(max_num_seqs=1, blocks=2)
    first, second = (make_sequence(prompt=range(5), max_tokens=2) for _ in range(2))
    scheduler.add(first)
    scheduler.add(second)
    assert run_step(scheduler) == [(first, 0, 5)]
    assert run_step(scheduler) == [(first, 5, 1)]
    assert first.finish_reason == "length"
    assert run_step(scheduler) == [(second, 0, 5)]


def test_nobody_overtakes_the_head_of_the_queue(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=5)
    running, large, small = (make_sequence(prompt=range(n), max_tokens=4) for n in (8, 14, 1))
    for sequence in (running, large, small):
        scheduler.add(sequence)
    assert run_step(scheduler) == [(running, 0, 8)]  # 2 of 5 blocks: `large` needs 4, `small` would fit
    for _ in range(3):
        assert [sequence for sequence, _, _ in run_step(scheduler)] == [running]
    assert [sequence for sequence, _, _ in run_step(scheduler)] == [large, small]


def test_who_found_no_room_gets_in_when_some_is_given_back(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=6)
    short, long, waiting = (make_sequence(prompt=range(8), max_tokens=n) for n in (3, 5, 5))
    for sequence in (short, long, waiting):
        scheduler.add(sequence)
    steps = [[sequence for sequence, _, _ in run_step(scheduler)] for _ in range(4)]
    assert steps == [[short, long, waiting], [short, long], [short, long], [long, waiting]]


def test_who_found_no_room_gets_in_when_its_prefix_has_been_computed(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=7, prefix_cache="hash")
    first, second = (make_sequence(prompt=range(16), max_tokens=4) for _ in range(2))
    scheduler.add(first)
    scheduler.add(second)
    assert run_step(scheduler) == [(first, 0, 16)]  # 3 blocks are left, `second` needs 4
    assert run_step(scheduler) == [(first, 16, 1), (second, 12, 4)]


def test_alone_a_sequence_shares_a_prefix_even_where_there_is_no_room_for_a_copy(
    make_scheduler, make_sequence, run_step
) -> None:
    """The cached prefix ends inside a block, and there is no third block to copy it to: the cache gives it up."""
    scheduler = make_scheduler(blocks=2, prefix_cache="radix")
    scheduler.add(make_sequence(prompt=range(5), max_tokens=1))
    run_step(scheduler)
    sequence = make_sequence(prompt=(*range(5), 8, 8), max_tokens=1)
    scheduler.add(sequence)
    assert run_step(scheduler) == [(sequence, 5, 2)]


def test_admission_leaves_the_watermark_free(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=10, watermark=0.25)  # two blocks
    first, second, third = (make_sequence(prompt=range(n), max_tokens=4) for n in (16, 14, 1))
    scheduler.add(first)
    assert run_step(scheduler) == [(first, 0, 16)]
    scheduler.add(second)
    scheduler.add(third)
    # 5 blocks are free beside the 5 of `first`: 4 and 2 would not be.
    assert [sequence for sequence, _, _ in run_step(scheduler)] == [first]
    scheduler.finish(first, "abort")
    assert [sequence for sequence, _, _ in run_step(scheduler)] == [second, third]


def test_what_alone_takes_the_whole_cache_ignores_the_watermark(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=4, watermark=0.5)
    sequence = make_sequence(prompt=range(14), max_tokens=2)
    scheduler.add(sequence)
    assert run_step(scheduler) == [(sequence, 0, 14)]


def test_what_a_chunked_prompt_still_needs_is_spoken_for(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=8, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    long, short = make_sequence(prompt=range(24), max_tokens=4), make_sequence(prompt=range(9), max_tokens=1)
    scheduler.add(long)
    scheduler.add(short)
    assert run_step(scheduler) == [(long, 0, 4)]  # holds one block, needs 6; 2 are left, `short` needs 3
    assert scheduler.kv.pool.num_held == 1


def test_ending_twice_keeps_the_first_reason(make_scheduler, make_sequence) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence()
    scheduler.add(sequence)
    scheduler.finish(sequence, "abort")
    scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "abort"
    assert not scheduler.has_unfinished()


def test_what_can_never_fit_is_refused_at_once(make_scheduler, make_sequence) -> None:
    scheduler = make_scheduler(blocks=25)
    scheduler.add(make_sequence(prompt=range(97), max_tokens=3, n=4))  # each of the four fits alone
    with pytest.raises(PromptTooLongError, match="104 tokens, but the KV cache holds 100"):
        scheduler.add(make_sequence(prompt=range(100), max_tokens=4))
    assert len(scheduler.waiting) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("max_num_batched_tokens", 20.0),
        ("long_prefill_token_threshold", -1),
        ("policy", "random"),
        ("batching", None),
        ("preemption", "kill"),
        ("watermark", 1.0),
        ("target_inter_token_latency", 0),
    ],
)
def test_a_bad_config_is_refused_by_name(field, value) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field}={value!r} is not valid"):
        SchedulerConfig(**{"max_num_seqs": 4, field: value})


def test_swapping_needs_a_place_to_swap_to(make_scheduler) -> None:
    with pytest.raises(InvalidArgumentError, match="num_host_blocks=0"):
        make_scheduler(preemption="swap")


def test_a_prompt_is_shared_once_it_is_computed_and_not_in_the_same_step(
    make_scheduler, make_sequence, run_step
) -> None:
    scheduler = make_scheduler(prefix_cache="hash", max_num_seqs=9)
    same = [make_sequence(prompt=range(9), max_tokens=3) for _ in range(3)]
    scheduler.add(same[0])
    scheduler.add(same[1])
    assert run_step(scheduler) == [(same[0], 0, 9), (same[1], 0, 9)]
    scheduler.add(same[2])
    assert run_step(scheduler)[2] == (same[2], 8, 1)  # 2 full blocks
    assert [sequence.num_cached_tokens for sequence in same] == [0, 0, 8]


def test_a_sequence_without_blocks_is_swept_from_every_place(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(blocks=4, preemption="swap", host_blocks=4)
    first, second = (make_sequence(prompt=range(7), max_tokens=8) for _ in range(2))
    waiting = make_sequence(prompt=range(7), max_tokens=8)
    for sequence in (first, second, waiting):
        scheduler.add(sequence)
    for _ in range(3):
        run_step(scheduler)
    statuses = [sequence.status for sequence in (first, second, waiting)]
    assert statuses == [SequenceStatus.RUNNING, SequenceStatus.SWAPPED, SequenceStatus.WAITING]
    for sequence in (first, second, waiting):
        scheduler.finish(sequence, "abort")
        assert not scheduler.kv.has(sequence.seq_id)
    assert not scheduler.has_unfinished()
    assert scheduler.kv.pool.num_held == scheduler.kv.usage().host_blocks_used == 0
