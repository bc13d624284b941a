from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vllm_teach.engine.request import SampledToken, Sequence, SequenceStatus
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Scheduler, StepResult
from vllm_teach.errors import EngineError, InvalidArgumentError, PromptTooLongError
from vllm_teach.kvcache.manager import ContiguousKVCacheManager


def new_scheduler(slots=100, seqs=4, budget=20):
    return Scheduler(ContiguousKVCacheManager(slots, 1), max_num_seqs=seqs, max_num_batched_tokens=budget)


def run_step(scheduler, token_id=9, fail=()):
    plan = scheduler.schedule()
    ids = [item.sequence.seq_id for item in plan.items]
    tokens = {seq_id: SampledToken(token_id) for seq_id in ids if seq_id not in fail}
    errors = {seq_id: EngineError("broken.") for seq_id in ids if seq_id in fail}
    scheduler.update(plan, StepResult(tokens, errors))
    return [(item.sequence, item.start, item.num_tokens) for item in plan.items]


def test_prefill_and_decode_share_a_step(make_sequence):
    scheduler = new_scheduler()
    first, second = make_sequence(prompt=range(5), max_tokens=3), make_sequence(prompt=range(7), max_tokens=3)
    scheduler.add(first)
    assert run_step(scheduler) == [(first, 0, 5)]
    scheduler.add(second)
    plan = scheduler.schedule()
    assert (plan.num_prefill_tokens, plan.num_decode_tokens) == (7, 1)
    assert [(item.start, item.num_tokens, item.is_prefill, item.context_len) for item in plan.items] == [
        (5, 1, False, 6),
        (0, 7, True, 7),
    ]
    assert plan.items[1].first_slot == 8  # behind the 5 + 3 slots of the first


def test_the_place_of_an_ended_sequence_is_taken_in_the_next_step(make_sequence):
    scheduler = new_scheduler(seqs=1, slots=8)
    first, second = (make_sequence(prompt=range(5), max_tokens=2) for _ in range(2))
    scheduler.add(first)
    scheduler.add(second)
    assert run_step(scheduler) == [(first, 0, 5)]
    assert run_step(scheduler) == [(first, 5, 1)]
    assert first.finish_reason == "length"
    assert run_step(scheduler) == [(second, 0, 5)]


def test_nobody_overtakes_the_head_of_the_queue(make_sequence):
    scheduler = new_scheduler(slots=20)
    running, large, small = (make_sequence(prompt=range(n), max_tokens=4) for n in (8, 12, 1))
    for sequence in (running, large, small):
        scheduler.add(sequence)
    assert run_step(scheduler) == [(running, 0, 8)]  # 12 of 20 slots: `large` needs 16, `small` would fit
    for _ in range(3):
        assert [sequence for sequence, _, _ in run_step(scheduler)] == [running]
    assert [sequence for sequence, _, _ in run_step(scheduler)] == [large]
    scheduler.finish(large, "abort")
    assert [sequence for sequence, _, _ in run_step(scheduler)] == [small]


def test_budget_bounds_a_step_and_a_longer_prompt_runs_as_its_only_one(make_sequence):
    scheduler = new_scheduler(budget=20)
    prompts = [make_sequence(prompt=range(n), max_tokens=1) for n in (9, 9, 9, 45, 3)]
    for sequence in prompts:
        scheduler.add(sequence)
    assert [n for _, _, n in run_step(scheduler)] == [9, 9]
    assert [n for _, _, n in run_step(scheduler)] == [9]
    assert [n for _, _, n in run_step(scheduler)] == [45]
    assert [n for _, _, n in run_step(scheduler)] == [3]


def test_stop_tokens(make_sequence):
    scheduler = new_scheduler()
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
    assert scheduler.kv.slots_held == 0


def test_a_failed_sequence_ends_and_frees_and_the_others_go_on(make_sequence):
    scheduler = new_scheduler()
    good, bad = make_sequence(), make_sequence()
    scheduler.add(good)
    scheduler.add(bad)
    run_step(scheduler, fail={bad.seq_id})
    assert isinstance(bad.error, EngineError)
    assert bad.finish_reason == "error"
    assert scheduler.running == [good]
    assert scheduler.kv.slots_held == good.max_total_tokens


def test_ending_twice_keeps_the_first_reason(make_sequence):
    scheduler = new_scheduler()
    sequence = make_sequence()
    scheduler.add(sequence)
    scheduler.finish(sequence, "abort")
    scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "abort"
    assert not scheduler.has_unfinished()


def test_what_can_never_fit_is_refused_at_once(make_sequence):
    with pytest.raises(PromptTooLongError, match="104 tokens"):
        new_scheduler(slots=100).add(make_sequence(prompt=range(100), max_tokens=4))
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens=3"):
        new_scheduler(seqs=4, budget=3)
    with pytest.raises(InvalidArgumentError, match="max_num_seqs=0"):
        new_scheduler(seqs=0)


class Trace(RuleBasedStateMachine):
    """Random arrivals, steps, failures and aborts; after each, the books must agree with one another."""

    known = Bundle("known")

    def __init__(self):
        super().__init__()
        self.scheduler = new_scheduler(slots=48, seqs=3, budget=16)
        self.all = []

    @rule(target=known, prompt=st.integers(1, 30), new=st.integers(1, 12), min_tokens=st.integers(0, 3))
    def add(self, prompt, new, min_tokens):
        params = SamplingParams(max_tokens=new, min_tokens=min(min_tokens, new))
        sequence = Sequence(len(self.all), 0, tuple(range(prompt)), params, prompt + new, frozenset({0}), "")
        self.scheduler.add(sequence)
        self.all.append(sequence)
        return sequence

    @rule(token_id=st.integers(0, 6), failing=st.integers(0, 9))
    def step(self, token_id, failing):
        waiting = list(self.scheduler.waiting)
        advanced = run_step(self.scheduler, token_id, fail={failing})
        admitted = [sequence for sequence, start, _ in advanced if start == 0]
        assert admitted == waiting[: len(admitted)]  # first come, first served
        decode = sum(1 for _, start, _ in advanced if start)
        prompts = [count for _, start, count in advanced if start == 0]
        assert len(advanced) <= 3
        assert decode + sum(prompts) <= 16 or len(prompts) == 1
        assert advanced or not self.scheduler.has_unfinished()  # never stuck

    @rule(sequence=consumes(known))
    def abort(self, sequence):
        self.scheduler.finish(sequence, "abort")
        assert sequence.finished

    @invariant()
    def books_agree(self):
        scheduler, kv = self.scheduler, self.scheduler.kv
        by_status = {status: [each for each in self.all if each.status is status] for status in SequenceStatus}
        assert list(scheduler.waiting) == by_status[SequenceStatus.WAITING]
        assert scheduler.running == by_status[SequenceStatus.RUNNING]
        assert kv.slots_held == sum(each.max_total_tokens for each in scheduler.running)
        assert kv.tokens_stored == sum(each.num_computed for each in scheduler.running)
        runs = sorted(
            (kv.reservation(each.seq_id).first_slot, kv.reservation(each.seq_id).num_slots)
            for each in scheduler.running
        )
        assert all(a + length <= b for (a, length), (b, _) in pairwise(runs))  # no slot held twice
        for each in self.all:
            assert each.finished == (each.finish_reason is not None)
            assert each.num_tokens <= each.max_total_tokens
            if each.finish_reason == "length":
                assert each.num_tokens == each.max_total_tokens
            if each.finish_reason == "stop":
                assert each.output_token_ids[-1] == 0
                assert len(each.output_token_ids) >= each.params.min_tokens

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_unfinished():
                break
            run_step(self.scheduler, token_id=1)
        assert all(each.finished for each in self.all)
        assert self.scheduler.kv.slots_held == 0
        assert self.scheduler.kv.longest_free_run == 48


TestTrace = Trace.TestCase
TestTrace.settings = settings(max_examples=150, deadline=None)
