"""Who computes what in the next step, who waits, and who gives up blocks when they run out. Knows no tensors.

A step mixes decode (one token for each running sequence) and prefill (prompts, in chunks), so a finished sequence's
place is taken in the very next step (Orca, Yu et al. 2022, section 3.1), and decodes go on while a long prompt is
computed (Sarathi-Serve, Agrawal et al. 2024, section 4).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vllm_teach.engine.events import Admitted, Arrived, BroughtBack, EventLog, Finished, Preempted, Scheduled, StepEnded
from vllm_teach.engine.plan import OpenStep, Plan, ScheduledSequence, StepResult
from vllm_teach.engine.queues import SequenceQueue
from vllm_teach.engine.request import Sequence, SequenceStatus
from vllm_teach.engine.scheduler_config import SchedulerConfig
from vllm_teach.engine.settle import Settler
from vllm_teach.engine.token_budget import TokenBudget
from vllm_teach.errors import InvalidArgumentError, PromptTooLongError, VllmTeachError

if TYPE_CHECKING:
    from vllm_teach.kvcache.manager import KVCacheManager


class Scheduler:
    """Keeps who waits, runs and is swapped out, in the order of `config.policy`, and the cache's blocks in step.

    Three rules see to it that every sequence ends. In each step the first running sequence advances: if blocks run out,
    they are taken from the last one, whoever is behind it in order. Nobody overtakes: swapped sequences come back
    before others are admitted, and these in the queue's order. And what could not run alone is refused by `add`.

    A step may break off at any of the three calls: `update` can be repeated, or `schedule` called again. Then the same
    tokens are planned again, and the transfers that the broken step did not get to are in the next plan.
    """

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig, events: EventLog) -> None:
        if config.preemption == "swap" and not kv.num_host_blocks:
            raise InvalidArgumentError(
                "preemption='swap' needs blocks on the host, but num_host_blocks=0: give some, or use 'recompute'."
            )
        self.kv, self.config, self.events = kv, config, events
        self.waiting = SequenceQueue(config.policy)
        self.running = SequenceQueue(config.policy)
        self.swapped = SequenceQueue(config.policy)
        self.preemptions: Counter[str] = Counter()  # by mode, since the start
        self._settler = Settler(self)
        self._token_budget = TokenBudget(config.max_num_batched_tokens, config.target_inter_token_latency)
        self._num_arrived = 0
        self._watermark = int(config.watermark * kv.num_blocks)
        self._batch_open = False  # static batching: whether others may still join
        self._last_plan = Plan()
        self._last_budget = 0
        self._last_ended = 0
        # Who found no place last, the room there was, and how many prefills had been computed.
        self._no_room: tuple[Sequence, int, int] | None = None

    def add(self, sequence: Sequence) -> None:
        """Put `sequence`, with its `forks`, into the queue. Raises PromptTooLongError if it could never run alone."""
        if not self.kv.can_ever_fit(sequence.max_total_tokens):
            raise PromptTooLongError(
                f"prompt and max_tokens come to {sequence.max_total_tokens} tokens, but the KV cache holds "
                f"{self.kv.max_tokens} of one sequence: shorten the prompt, lower max_tokens or give it more memory."
            )
        for each in (sequence, *sequence.forks):
            each.arrival = self._num_arrived
            self._num_arrived += 1
        self.events.record(Arrived(sequence.seq_id, len(sequence.prompt_token_ids), len(sequence.forks)))
        self.waiting.add(sequence)

    def schedule(self) -> Plan:
        """Return the next step: running sequences, then swapped ones, then new ones, while tokens and blocks last.

        It has at least one item whenever there is anything unfinished.
        """
        self.events.step += 1
        step = OpenStep(self._budget())
        for kind in ("prefill", "decode") if self.config.batching == "prefill_first" else ("any",):
            self._advance_running(step, kind)
            if not step.preempted:
                self._bring_back(step, kind)
                self._admit(step, kind)
            if step.items:
                break
        return self._close(step)

    def update(self, plan: Plan, result: StepResult) -> list[Sequence]:
        """Record what a step computed: count the tokens, append the sampled ones, branch forks off, end what ends.

        Ended sequences leave the cache at once. Returns the sequences that took part, those that branched off included.
        """
        if result.tokens or (plan.items and not result.errors):
            plan.num_applied = len(plan.transfers)  # or there would be no tokens
        advanced = [sequence for item in plan.items for sequence in self._settler.settle(item, result)]
        if plan.step > self._last_ended:
            self._last_ended = plan.step
            self._record_end(plan)
        return advanced

    def observe(self, seconds: float) -> None:
        """Tell how long the last step took: what `target_inter_token_latency` adapts the token budget to."""
        self._token_budget.observe(self._last_plan.num_tokens, self._last_plan.num_decode_tokens, seconds)

    def finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: VllmTeachError | None = None,
    ) -> None:
        """End `sequence` from any state and free its blocks. One that has ended already stays as it is.

        If its prompt is not computed yet, the first of its forks takes its place.
        """
        if sequence.finished:
            return
        self.kv.free(sequence.seq_id, sequence.tokens, sequence.num_computed)
        queues = (self.running, self.waiting, self.swapped)
        if not any(queue.discard(sequence) for queue in queues):  # then it has not branched off yet
            for leader in (each for queue in queues for each in queue if sequence in each.forks):
                leader.forks.remove(sequence)
        if sequence.forks:
            heir, *heir.forks = sequence.forks
            sequence.forks = []
            heir.in_hit_statistics = sequence.in_hit_statistics
            self.waiting.add(heir)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        self.events.record(Finished(sequence.seq_id, reason))

    def has_unfinished(self) -> bool:
        """Whether any sequence waits, runs or is swapped out."""
        return bool(self.waiting or self.running or self.swapped)

    def _budget(self) -> int:
        """Return the tokens of the next step: at least one for each running sequence."""
        num_decoding = sum(each.is_decoding for each in self.running)
        self._last_budget = max(self._token_budget.limit(num_decoding), len(self.running))
        return self._last_budget

    def _advance_running(self, step: OpenStep, kind: str) -> None:
        """Plan the running sequences in order; each that lacks blocks takes them from the last in order.

        So whoever is preempted comes behind all that are planned already, and nobody leaves a plan.
        """
        chosen = [each for each in self.running if _is_of(each, kind)]
        step.owed = len(chosen)
        for sequence in chosen:
            if sequence.status is not SequenceStatus.RUNNING:
                break  # preempted, as are those behind it
            step.owed -= 1
            count = self._num_new(step, sequence)
            while count and not self._plan(step, sequence, count):
                victim = self.running[-1]
                self._preempt(step, victim)
                if victim is sequence:
                    break

    def _bring_back(self, step: OpenStep, kind: str) -> None:
        """Swap in, in order, what fits with the watermark kept; whatever does, if nothing runs."""
        while self.swapped and self._has_place(step) and _is_of(self.swapped[0], kind):
            sequence = self.swapped[0]
            blocks = -(-sequence.num_computed // self.kv.block_size)
            if (self.running and blocks > self._room()) or not self.kv.swap_in(sequence.seq_id):
                break
            del self.swapped[0]
            self._run(sequence)
            self.events.record(BroughtBack(sequence.seq_id))
            # If the last block is missing, its turn as a running sequence comes in the next step.
            count = self._num_new(step, sequence)
            if count:
                self._plan(step, sequence, count)

    def _admit(self, step: OpenStep, kind: str) -> None:
        """Let waiting sequences in, in order, until one does not fit. Swapped ones come first."""
        if self.swapped or kind == "decode":
            return
        if self.config.batching == "static":
            self._batch_open |= not self.running
            if not self._batch_open:
                return
        while self.waiting and self._has_place(step) and self._try_to_admit(step, self.waiting[0]):
            pass
        self._batch_open = step.short  # static: who only lacked tokens joins the batch in the next step

    def _try_to_admit(self, step: OpenStep, sequence: Sequence) -> bool:
        """Start `sequence` from what the cache has of its prefix, if the blocks for all its tokens are there."""
        room, prefixes = self._room(), self._settler.num_prefills
        if self._lacked_room(sequence, room, prefixes):
            return False
        cached = self._begin(sequence)
        count = self._num_new(step, sequence)
        # Alone it always fits: all that it does not hold itself is free or idle.
        fits = self.kv.blocks_to_extend(sequence.seq_id, sequence.num_tokens) <= self._room()
        if count and fits and self._plan(step, sequence, count):
            self.waiting.discard(sequence)
            self._run(sequence)
            resumed = sequence.num_preemptions > 0 or bool(sequence.output_token_ids)
            if not resumed:
                sequence.num_cached_tokens = cached
            self.events.record(Admitted(sequence.seq_id, cached, resumed))
            return True
        self.kv.free(sequence.seq_id)
        sequence.num_computed = 0
        self._no_room = (sequence, room, prefixes)
        return False

    def _lacked_room(self, sequence: Sequence, room: int, prefixes: int) -> bool:
        """Whether `sequence` found no place before, and neither room nor new prefixes have come since.

        Looking a long prompt up in the cache takes longer than all the rest of a step.
        """
        before = self._no_room
        return before is not None and before[0] is sequence and room <= before[1] and prefixes == before[2]

    def _begin(self, sequence: Sequence) -> int:
        """Give `sequence` a table with what the cache has of its prefix; return how many tokens that is."""
        tokens, count = sequence.tokens(0, sequence.num_tokens), not sequence.in_hit_statistics
        sequence.in_hit_statistics = True
        sequence.num_computed = self.kv.begin(
            sequence.seq_id, tokens, salt=sequence.salt, share=sequence.share_prefix, count=count
        )
        return sequence.num_computed

    def _num_new(self, step: OpenStep, sequence: Sequence) -> int:
        """Return how many tokens of `sequence` the step computes; 0 if it has none left for it."""
        missing, room = sequence.num_missing, step.room
        if not self.config.enable_chunked_prefill or self.config.batching == "prefill_first":
            fits = missing <= room or (room > 0 and all(item.is_decode for item in step.items))
            count = missing if fits or sequence.is_decoding else 0
        elif sequence.is_decoding:
            count = 1
        else:
            count = max(0, min(missing, room, self.config.long_prefill_token_threshold or missing))
        step.short |= not count
        return count

    def _plan(self, step: OpenStep, sequence: Sequence, count: int) -> bool:
        """Put `count` tokens of `sequence` into the step; False, and nothing changed, if their blocks are not there."""
        start = sequence.num_tokens - sequence.num_missing
        if not self.kv.extend(sequence.seq_id, start + count):
            return False
        step.add(ScheduledSequence(sequence, start, count, self.kv.table(sequence.seq_id).blocks))
        return True

    def _preempt(self, step: OpenStep, victim: Sequence) -> None:
        """Take the blocks of `victim`, which runs: it is swapped out, or queued to be computed again."""
        self.running.discard(victim)
        wanted, computed = self.config.preemption, victim.num_computed
        if wanted == "auto":
            wanted = self.config.costs.cheaper(computed)
        if wanted == "swap" and computed and self.kv.swap_out(victim.seq_id):
            mode, victim.status = "swap", SequenceStatus.SWAPPED
            self.swapped.add(victim)
        else:
            self.kv.free(victim.seq_id, victim.tokens, computed)
            mode, victim.status, victim.num_computed = "recompute", SequenceStatus.WAITING, 0
            self.waiting.add(victim)
        victim.num_preemptions += 1
        self.preemptions[mode] += 1
        step.preempted.append(victim)
        self.events.record(Preempted(victim.seq_id, mode, computed, wanted))

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def _has_place(self, step: OpenStep) -> bool:
        """Whether one sequence more may run and the step has a token for it."""
        if len(self.running) >= self.config.max_num_seqs:
            return False
        step.short |= step.budget <= 0
        return step.budget > 0

    def _room(self) -> int:
        """Return how many blocks may go to one sequence more: what the running prompts still need is spoken for."""
        if not self.running:
            return self.kv.pool.num_available
        prompts = (each for each in self.running if each.in_prefill)
        promised = sum(self.kv.blocks_to_extend(each.seq_id, each.num_tokens) for each in prompts)
        return self.kv.pool.num_available - promised - self._watermark

    def _close(self, step: OpenStep) -> Plan:
        """Return the finished plan, with the transfers that the last one did not get to."""
        missed = self._last_plan.transfers[self._last_plan.num_applied :]
        transfers = (*missed, *self.kv.take_transfers())
        self._last_plan = Plan(self.events.step, tuple(step.items), transfers, tuple(step.preempted))
        for item in step.items:
            self.events.record(Scheduled(item.sequence.seq_id, item.start, item.num_tokens))
        return self._last_plan

    def _record_end(self, plan: Plan) -> None:
        prefill, decode = plan.num_prefill_tokens, plan.num_decode_tokens
        waiting, running, swapped = len(self.waiting), len(self.running), len(self.swapped)
        self.events.record(StepEnded(prefill, decode, self._last_budget, running, waiting, swapped))


def _is_of(sequence: Sequence, kind: str) -> bool:
    return kind == "any" or (kind == "prefill") == sequence.in_prefill
