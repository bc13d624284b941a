"""What one step does: which sequences advance by how many tokens, and which blocks are copied before."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

from vllm_teach.engine.request import SampledToken, Sequence, TopLogprobs
from vllm_teach.errors import VllmTeachError
from vllm_teach.kvcache.transfers import Transfer


@dataclass(frozen=True, eq=False)
class ScheduledSequence:
    """`sequence` advances by `num_tokens` tokens, the first of them at position `start`.

    `blocks` is its block table, the list itself: logical block -> physical block. It is valid until the next
    `schedule` or `update`. `samples` says whether the step reaches the sequence's last known token, so that a new one
    is drawn: one for `sequence` and one for each of `sequence.forks`. It is fixed here, since `update` appends tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    blocks: collections.abc.Sequence[int]
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.context_len == self.sequence.num_tokens)

    @property
    def context_len(self) -> int:
        """How many tokens of the sequence are in the cache when the step is done."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it computes one generated token, to draw the next; anything else is prefill."""
        return self.samples and self.num_tokens == 1 and self.start >= len(self.sequence.prompt_token_ids)


@dataclass(eq=False)
class Plan:
    """One step. The runner applies `transfers` in their order, then computes `items` in one batch.

    It counts in `num_applied` the transfers that took place: if the step breaks off, the next plan brings the others.
    `preempted` are the sequences that lost their place; they are in no plan until they come back.
    """

    step: int = 0
    items: tuple[ScheduledSequence, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    num_applied: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in this step."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of sequences that are recomputed after a preemption."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of sequences that decode, one each."""
        return sum(1 for item in self.items if item.is_decode)


@dataclass
class OpenStep:
    """A plan in the making: `budget` tokens are left, of which `owed` belong to running sequences still to come.

    `short`: somebody got nothing for want of tokens.
    """

    budget: int
    owed: int = 0
    short: bool = False
    items: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens that are left for prefill."""
        return self.budget - self.owed

    def add(self, item: ScheduledSequence) -> None:
        """Plan `item`; its tokens leave the budget."""
        self.items.append(item)
        self.budget -= item.num_tokens


@dataclass
class StepResult:
    """What came of a plan, by sequence id: a sampled token, or the error that ends that sequence.

    Each item that `samples` has one or the other, and so has each of its forks; an item that does not has an error or
    nothing. `prompt_logprobs` has, for an item whose request asks for them, one entry for each token of the prompt from
    position `start + 1` on that the step predicts: at most `num_tokens` of them, the last prompt token's at most.
    """

    tokens: dict[int, SampledToken] = field(default_factory=dict)
    errors: dict[int, VllmTeachError] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TopLogprobs]] = field(default_factory=dict)
