"""What a computed step changes: tokens are counted and appended, siblings branch off, and what is at its end ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_teach.engine.events import FirstToken, Forked
from vllm_teach.engine.plan import ScheduledSequence, StepResult
from vllm_teach.engine.request import SampledToken, Sequence, SequenceStatus

if TYPE_CHECKING:
    from vllm_teach.engine.scheduler import Scheduler


class Settler:
    """Brings the results of a plan's items to the sequences of `scheduler`.

    Every change can be made twice with the effect of once: `update` is repeated when it was interrupted.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._kv, self._events = scheduler, scheduler.kv, scheduler.events
        self.num_prefills = 0  # of items computed so far that were no decodes: each may be somebody's prefix

    def settle(self, item: ScheduledSequence, result: StepResult) -> list[Sequence]:
        """Record the result of one item; return its sequence and those that branched off it.

        One that ended since the plan was made (an abort) stays as it is.
        """
        sequence = item.sequence
        if sequence.finished:
            return [sequence]
        error = result.errors.get(sequence.seq_id)
        branches = list(sequence.forks) if item.samples or error is not None else []
        # A sampler's error concerns one sequence; if no sibling has a token either, the step itself failed.
        if error is None or any(fork.seq_id in result.tokens for fork in branches):
            self._count(item)
            self._keep_prompt_logprobs(item, result)
        for fork in branches:
            self._branch_off(item, fork, result)
        if error is not None:
            self._scheduler.finish(sequence, "error", error=error)
        elif item.samples:
            if sequence.num_tokens == item.context_len:
                self._append(sequence, result.tokens[sequence.seq_id])
            self._stop_at_end(sequence)
        return [sequence, *branches]

    def _count(self, item: ScheduledSequence) -> None:
        """The item's tokens are in the cache: prefixes that are complete can be shared, blocks out of sight go."""
        sequence, computed = item.sequence, item.context_len
        if sequence.num_computed >= computed:
            return
        self._kv.commit(sequence.seq_id, computed, sequence.tokens)
        unseen, size = self._scheduler.config.unseen, self._kv.block_size
        # A block goes out of sight when the sequence has come to the end of one, at the earliest.
        if unseen is not None and computed // size > item.start // size:
            self._kv.drop(sequence.seq_id, unseen(computed))
        sequence.num_computed = computed  # last: until then all of this can be repeated
        self.num_prefills += not item.is_decode

    def _keep_prompt_logprobs(self, item: ScheduledSequence, result: StepResult) -> None:
        entries = result.prompt_logprobs.get(item.sequence.seq_id)
        if entries is not None:
            # By position: a prompt that is computed again after a preemption says the same again.
            item.sequence.prompt_logprobs[item.start + 1 : item.start + 1 + len(entries)] = entries

    def _branch_off(self, item: ScheduledSequence, fork: Sequence, result: StepResult) -> None:
        """Give `fork` the blocks of the prompt and its own first token. It runs, or waits if no place is free."""
        scheduler, parent = self._scheduler, item.sequence
        error = result.errors.get(fork.seq_id)
        if error is None and fork.seq_id not in result.tokens:
            error = result.errors[parent.seq_id]  # the step failed for all of them
        if error is not None:
            scheduler.finish(fork, "error", error=error)
            return
        if fork.num_tokens == item.context_len:
            self._place(item, fork)
            self._append(fork, result.tokens[fork.seq_id])
        self._stop_at_end(fork)
        parent.forks.remove(fork)

    def _place(self, item: ScheduledSequence, fork: Sequence) -> None:
        scheduler, parent = self._scheduler, item.sequence
        queued = len(scheduler.running) >= scheduler.config.max_num_seqs
        fork.in_hit_statistics = True  # its prompt was looked up once, by its parent
        if queued:
            scheduler.waiting.add(fork)
        else:
            if not self._kv.has(fork.seq_id):
                self._kv.fork(parent.seq_id, fork.seq_id)
            fork.num_computed, fork.status = item.context_len, SequenceStatus.RUNNING
            scheduler.running.add(fork)
        self._events.record(Forked(parent.seq_id, fork.seq_id, queued))

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        sequence.new_token = token
        sequence.output_token_ids.append(token.token_id)
        if len(sequence.output_token_ids) == 1:
            self._events.record(FirstToken(sequence.seq_id))

    def _stop_at_end(self, sequence: Sequence) -> None:
        last, enough = sequence.output_token_ids[-1], len(sequence.output_token_ids) >= sequence.params.min_tokens
        if enough and last in sequence.stop_ids:
            named = last in (sequence.params.stop_token_ids or ())
            self._scheduler.finish(sequence, "stop", stop_reason=last if named else None)
        elif sequence.num_tokens >= sequence.max_total_tokens:
            self._scheduler.finish(sequence, "length")
