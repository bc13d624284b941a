"""Random traces through scheduler and cache, with a storage that remembers which text each slot belongs to."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_teach.engine.events import EventLog
from vllm_teach.engine.plan import StepResult
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.engine.request import SampledToken, Sequence, SequenceStatus
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Scheduler
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.errors import EngineError, PromptTooLongError
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.manager import KVCacheManager

WINDOW = 5
COSTS = PreemptionCosts(prefill_seconds_per_token=1.0, attention_seconds_per_pair=0.1, kv_bytes_per_token=1e9)


class Storage:
    """For each slot of cache and host the salt and text, up to its own token, that it was written for."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.device, self.host = {}, {}

    def apply(self, transfers):
        for transfer in transfers:
            source = self.host if transfer.kind == "swap_in" else self.device
            target = self.host if transfer.kind == "swap_out" else self.device
            contents = [(destination, list(source.get(block, ()))) for block, destination in transfer.pairs]
            target.update(contents)

    def execute(self, plan, text_of):
        """Write the plan's tokens, then check that each query finds the text before it; a window hides some of it."""
        self.apply(plan.transfers)
        plan.num_applied = len(plan.transfers)
        for item in plan.items:
            for position in range(item.start, item.context_len):
                block = self.device.setdefault(item.blocks[position // self.block_size], [])
                offset = position % self.block_size
                block[:] = [*block, *[None] * self.block_size][: self.block_size]
                block[offset] = text_of(item.sequence, position)

    def check(self, plan, text_of, hidden):
        for item in plan.items:
            for position in range(item.context_len):
                block = item.blocks[position // self.block_size]
                if block == NO_BLOCK:
                    assert hidden(position, item.start)
                else:
                    assert self.device[block][position % self.block_size] == text_of(item.sequence, position)


def text_of(sequence, position):
    return sequence.salt, tuple(sequence.tokens(0, position + 1))


class Machine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 16),
        block_size=st.sampled_from([1, 2, 4]),
        cache=st.sampled_from([None, "hash", "radix"]),
        placement=st.sampled_from(["scattered", "scattered", "contiguous", "prefer_contiguous"]),
        host=st.sampled_from([2, 8, 30]),
        window=st.sampled_from([False, False, False, True]),
        data=st.data(),
    )
    def start(self, num_blocks, block_size, cache, placement, host, window, data):
        unseen = None
        if window:  # the first block is a sink

            def unseen(computed):
                return [block for block in range(1, computed) if (block + 1) * block_size <= computed - WINDOW]

        most = data.draw(st.sampled_from([5, 3, 2, 1]))
        chunked = data.draw(st.booleans())
        config = SchedulerConfig(
            max_num_seqs=most,
            max_num_batched_tokens=most + data.draw(st.integers(0, 12)),
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            batching=data.draw(st.sampled_from(["continuous", "continuous", "static", "prefill_first"])),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 3])) if chunked else 0,
            watermark=data.draw(st.sampled_from([0.0, 0.3])),
            preemption=data.draw(st.sampled_from(["recompute", "swap", "auto"])),
            target_inter_token_latency=data.draw(st.sampled_from([None, 1.0])),
            unseen=unseen,
            costs=COSTS,
        )
        self.events = EventLog()
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            prefix_cache=cache,
            placement=placement,
            num_host_blocks=host,
            record=self.events.record,
        )
        self.scheduler = Scheduler(self.kv, config, self.events)
        self.storage = Storage(block_size)
        self.all = []
        self.was_full = False  # static: then a batch goes on forming in the next step

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        new=st.sampled_from([1, 4, 8, 14]),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "x"]),
        share=st.sampled_from([True, True, False]),
    )
    def add(self, prompt, new, n, priority, salt, share):
        ids = range(len(self.all), len(self.all) + n)
        params, total = SamplingParams(max_tokens=new), len(prompt) + new
        family = [
            Sequence(
                seq_id=seq_id,
                index=index,
                prompt_token_ids=tuple(prompt),
                params=params,
                max_total_tokens=total,
                stop_ids=frozenset({5}),
                random_source="",
                priority=priority,
                salt=salt,
                share_prefix=share,
            )
            for index, seq_id in enumerate(ids)
        ]
        family[0].forks = family[1:]
        try:
            self.scheduler.add(family[0])
        except PromptTooLongError:
            assert not self.kv.can_ever_fit(total)
        else:
            self.all += family

    @rule(
        data=st.data(),
        steps=st.integers(1, 6),
        failing=st.sampled_from([None, None, None, None, 0, 1]),
        twice=st.sampled_from([0, 0, 0, 1, 2, 3]),
    )
    def step(self, data, steps, failing, twice):
        for _ in range(steps):
            self.run(lambda: data.draw(st.integers(0, 9)), failing, twice)
            failing = None

    def run(self, draw, failing=None, twice=0):
        """One step. `twice`: 1, 2: planned again after it broke off before or in the execution; 3: updated twice."""
        plan = self.schedule()
        if twice in (1, 2):
            if twice == 2:
                self.storage.execute(plan, text_of)
            plan = self.schedule()
        self.storage.execute(plan, text_of)
        self.storage.check(plan, text_of, self.hidden)
        result = StepResult()
        for number, item in enumerate(plan.items):
            family = [item.sequence, *item.sequence.forks]
            if number == failing:
                result.errors |= {each.seq_id: EngineError("broken.") for each in family}
            elif item.samples:
                result.tokens |= {each.seq_id: SampledToken(draw()) for each in family}
        for _ in range(2 if twice == 3 else 1):
            self.scheduler.update(plan, result)
        self.scheduler.observe(plan.num_tokens / 6)

    def hidden(self, position, query):
        return self.scheduler.config.unseen is not None and self.kv.block_size <= position <= query - WINDOW

    def schedule(self):
        """Plan a step and check the plan."""
        scheduler, config = self.scheduler, self.scheduler.config
        waiting, swapped = list(scheduler.waiting), list(scheduler.swapped)
        running, busy = list(scheduler.running), bool(scheduler.running or swapped)
        plan = scheduler.schedule()
        assert plan.items or not scheduler.has_unfinished()  # never stuck
        assert len({item.sequence.seq_id for item in plan.items}) == len(plan.items) <= config.max_num_seqs
        for item in plan.items:
            sequence = item.sequence
            assert sequence.status is SequenceStatus.RUNNING
            # Exactly what is missing, from the first missing token on.
            assert item.start == sequence.num_computed
            assert item.num_tokens >= 1
            assert item.context_len <= sequence.num_tokens
            assert item.samples == (item.context_len == sequence.num_tokens)
            assert item.blocks is self.kv.table(sequence.seq_id).blocks
            for position in range(item.start, item.context_len):  # what is written belongs to nobody else
                block = item.blocks[position // self.kv.block_size]
                assert (self.kv.pool.holders(block), self.kv.pool.pins(block)) == (1, 0)
        whole = not config.enable_chunked_prefill or config.batching == "prefill_first"
        prompts = [item.num_tokens for item in plan.items if not item.is_decode]
        excused = prompts[0] - 1 if whole and prompts else 0
        assert plan.num_tokens - excused <= config.max_num_batched_tokens
        if running and config.batching != "prefill_first":
            assert plan.items[0].sequence is running[0]  # the first in order always advances
        if config.batching == "prefill_first":
            decodes = [each.seq_id for each in (*running, *swapped) if each.num_tokens - each.num_computed == 1]
            assert len({item.sequence.seq_id in decodes for item in plan.items}) <= 1
        # In order, and none while others are swapped out or were preempted just now.
        admitted = [each for each in waiting if each.status is SequenceStatus.RUNNING]
        assert admitted == waiting[: len(admitted)]
        back = [each for each in swapped if each.status is SequenceStatus.RUNNING]
        assert back == swapped[: len(back)]
        if admitted:
            assert not plan.preempted
            assert not scheduler.swapped
            assert config.batching != "static" or not busy or whole or self.was_full
        if not plan.preempted:
            self.was_full = plan.num_tokens >= self.scheduler._last_budget
        return plan

    @precondition(lambda self: any(not each.finished for each in self.all))
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def abort(self, data, really):
        if not really:
            return
        sequence = data.draw(st.sampled_from([each for each in self.all if not each.finished]))
        self.scheduler.finish(sequence, "abort")
        assert sequence.finish_reason == "abort"

    @rule()
    def compact(self):
        self.kv.compact()

    @invariant()
    def books_agree(self):
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        for queue, status in (
            (scheduler.running, SequenceStatus.RUNNING),
            (scheduler.swapped, SequenceStatus.SWAPPED),
            (scheduler.waiting, SequenceStatus.WAITING),
        ):
            assert all(each.status is status for each in queue)
            assert list(queue) == sorted(queue, key=queue.key)
        forks = [
            fork
            for queue in (scheduler.running, scheduler.swapped, scheduler.waiting)
            for each in queue
            for fork in each.forks
        ]
        homes = [*scheduler.running, *scheduler.swapped, *scheduler.waiting, *forks]
        assert sorted(each.seq_id for each in homes) == [each.seq_id for each in self.all if not each.finished]
        held = Counter(block for each in scheduler.running for block in self.blocks_of(each) if block != NO_BLOCK)
        for block in range(self.kv.num_blocks):
            assert self.kv.pool.holders(block) == held[block]
        for each in self.all:
            assert self.kv.has(each.seq_id) == (each in scheduler.running or each in scheduler.swapped)
            assert each.num_tokens <= each.max_total_tokens
            assert each.finished == (each.finish_reason is not None)

    def blocks_of(self, sequence):
        table = self.kv.table(sequence.seq_id)
        return [*table.blocks, *table.spare]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.scheduler.has_unfinished():
            self.run(lambda: 1)
            self.books_agree()
            steps += 1
            assert steps < 3000
        assert all(each.finished for each in self.all)
        usage = self.kv.usage()
        assert self.kv.pool.num_held == usage.host_blocks_used == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
