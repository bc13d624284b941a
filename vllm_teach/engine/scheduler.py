"""Who computes what in the next step: first come, first served, continuous batching. Knows no tensors.

A step mixes decode (one token for each running sequence) and prefill (whole prompts of sequences that just got in), so
a finished sequence's place is taken in the very next step (Orca, Yu et al. 2022, section 3.1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_teach.engine.config import check_batch_limits
from vllm_teach.engine.request import SampledToken, Sequence, SequenceStatus
from vllm_teach.errors import PromptTooLongError, VllmTeachError
from vllm_teach.kvcache.manager import ContiguousKVCacheManager


@dataclass(frozen=True)
class ScheduledSequence:
    """`sequence` advances by `num_tokens`, the first of them at position `start`.

    The token at position p goes into slot `first_slot + p` of the KV cache.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    first_slot: int

    @property
    def is_prefill(self) -> bool:
        """Whether it computes tokens of the prompt."""
        return self.start < len(self.sequence.prompt_token_ids)

    @property
    def context_len(self) -> int:
        """How many tokens of the sequence are in the cache when the step is done."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Plan:
    """One step: which sequences advance, and by how many tokens."""

    items: tuple[ScheduledSequence, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens in this step."""
        return sum(item.num_tokens for item in self.items if item.is_prefill)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of running sequences in this step, one each."""
        return sum(item.num_tokens for item in self.items if not item.is_prefill)


@dataclass
class StepResult:
    """What came of a plan: for each sequence id a sampled token, or the error that ends that sequence."""

    tokens: dict[int, SampledToken] = field(default_factory=dict)
    errors: dict[int, VllmTeachError] = field(default_factory=dict)


class Scheduler:
    """Keeps the queue of waiting sequences and the list of running ones, and the KV reservations in step with them.

    At most `max_num_seqs` sequences run at once. A step computes at most `max_num_batched_tokens` tokens, with one
    exception: the first prompt of a step is taken whatever its length, since a prompt is computed whole and one that is
    longer than the budget would otherwise wait forever.
    """

    def __init__(self, kv: ContiguousKVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        check_batch_limits(max_num_seqs, max_num_batched_tokens)
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` at the end of the queue. Raises PromptTooLongError if the cache could never hold it."""
        if sequence.max_total_tokens > self.kv.num_slots:
            raise PromptTooLongError(
                f"prompt and max_tokens come to {sequence.max_total_tokens} tokens, but the KV cache holds "
                f"{self.kv.num_slots}: shorten the prompt, lower max_tokens or give the cache more memory."
            )
        self.waiting.append(sequence)

    def schedule(self) -> Plan:
        """Return the next step. Admits waiting sequences: reserves their slots and moves them to `running`."""
        items = [self._advance(sequence) for sequence in self.running]
        budget = self.max_num_batched_tokens - len(items)
        first_prompt = True
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not first_prompt and sequence.num_tokens > budget:
                break
            # First come, first served: when the head of the queue does not fit, nobody overtakes it.
            if not self.kv.can_allocate(sequence.max_total_tokens):
                break
            self.waiting.popleft()
            self.kv.allocate(sequence.seq_id, sequence.max_total_tokens)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            items.append(self._advance(sequence))
            budget -= sequence.num_tokens
            first_prompt = False
        return Plan(tuple(items))

    def update(self, plan: Plan, result: StepResult) -> list[Sequence]:
        """Record what a step computed: count the tokens, append the sampled ones, end what is at its end.

        Ended sequences leave the cache at once. Returns the sequences of the plan, in its order.
        """
        for item in plan.items:
            sequence = item.sequence
            if sequence.seq_id in result.errors:
                self.finish(sequence, "error", error=result.errors[sequence.seq_id])
                continue
            # Both say the same when they are said twice, as after an interrupt.
            sequence.num_computed = item.context_len
            self.kv.store(sequence.seq_id, item.context_len - self.kv.reservation(sequence.seq_id).num_stored)
            sequence.new_token = result.tokens[sequence.seq_id]
            sequence.output_token_ids.append(sequence.new_token.token_id)
            self._stop_at_end(sequence, sequence.new_token.token_id)
        return [item.sequence for item in plan.items]

    def finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: VllmTeachError | None = None,
    ) -> None:
        """End `sequence` from any state and free its slots. One that has ended already stays as it is."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.kv.free(sequence.seq_id)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error

    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def _advance(self, sequence: Sequence) -> ScheduledSequence:
        start = min(sequence.num_computed, sequence.num_tokens - 1)
        return ScheduledSequence(
            sequence,
            start=start,
            # At least one: a prediction needs its last token, also if an interrupt fell between two counts.
            num_tokens=sequence.num_tokens - start,
            first_slot=self.kv.reservation(sequence.seq_id).first_slot,
        )

    def _stop_at_end(self, sequence: Sequence, token_id: int) -> None:
        enough = len(sequence.output_token_ids) >= sequence.params.min_tokens
        if enough and token_id in sequence.stop_ids:
            named = token_id in (sequence.params.stop_token_ids or ())
            self.finish(sequence, "stop", stop_reason=token_id if named else None)
        elif sequence.num_tokens >= sequence.max_total_tokens:
            self.finish(sequence, "length")
