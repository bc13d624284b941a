"""Beam search on the paged cache: beams share the blocks of what they have in common.

Each beam is a sequence. Where several beams continue one, they fork: they share all its blocks, and a block is copied
only when one of them writes into it (PagedAttention, Kwon et al. 2023, section 4.4). Beams that nobody continues give
back theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_teach.engine.beam_params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from vllm_teach.engine.beam_selection import Beam, BeamSelection
from vllm_teach.engine.events import Admitted, Finished, Forked, Scheduled
from vllm_teach.engine.failure import engine_error, shown
from vllm_teach.engine.field_checks import refuse
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.outputs import Logprob
from vllm_teach.engine.plan import ScheduledSequence
from vllm_teach.engine.prompts import Prompt
from vllm_teach.engine.request import Sequence, TopLogprobs
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError, PromptTooLongError, VllmTeachError


@dataclass(eq=False)
class _Search:
    """One prompt: its tokens, the rules' state, and a sequence for each of `selection.live`."""

    token_ids: tuple[int, ...]
    salt: str
    selection: BeamSelection
    num_blocks: int
    beams: list[Sequence] = field(default_factory=list)


class BeamSearch:
    """Searches the best texts after each of `prompts`, one step at a time, on an engine that has nothing else to do.

    A prompt is taken up when the blocks are free that its beams need even if they come to share nothing but the
    prompt's full blocks, so no beam is ever preempted; the others wait for their turn. Between two steps `engine.kv`
    and `engine.events` show what is shared. `close` ends the search, whatever its state, and frees its blocks.

    Raises, naming the prompt, what `engine.validate` raises, and PromptTooLongError for one that the cache could not
    hold alone; InvalidArgumentError for more beams than `max_num_seqs`, and EngineError while the engine has requests.
    """

    def __init__(self, engine: LLMEngine, prompts: list[Prompt], params: BeamSearchParams) -> None:
        if not isinstance(params, BeamSearchParams):
            refuse("params", params, "use a BeamSearchParams")
        if params.beam_width > engine.config.max_num_seqs:
            most = shown(engine.config.max_num_seqs)
            hint = f"each beam is a sequence, and max_num_seqs={most}, so use fewer, or an engine for more"
            refuse("beam_width", params.beam_width, hint)
        self.engine, self.params = engine, params
        self._check_alone()
        self._stop_ids = frozenset(() if params.ignore_eos else engine.tokenizer.stop_token_ids)
        self._searches = [self._checked(index, prompt) for index, prompt in enumerate(prompts)]
        self._waiting = deque(self._searches)
        self._running: list[_Search] = []

    @property
    def unfinished(self) -> bool:
        """Whether a further `step` would do something."""
        return bool(self._waiting or self._running)

    @property
    def num_finished(self) -> int:
        """Prompts whose search has ended."""
        return len(self._searches) - len(self._waiting) - len(self._running)

    @property
    def beams(self) -> list[Sequence]:
        """The sequences that grow now, of all prompts; `engine.kv.table(beam.seq_id)` is the block table of one."""
        return [beam for search in self._running for beam in search.beams]

    def step(self) -> None:
        """Advance all beams by a token, or prompts by a chunk, in one plan; then choose, fork and free.

        Raises EngineError when the forward pass fails or gives no probabilities; close the search then.
        """
        with self.engine.exclusive.change():
            self._check_alone()
            # The scheduler has nothing to run: its plan has the step's number and the transfers that are overdue. Ours
            # go into it, so that it brings them again if this step breaks off before they are applied.
            plan = self.engine.scheduler.schedule()
            self._admit()
            plan.items = self._advance()
            plan.transfers += self.engine.kv.take_transfers()
            try:
                result = self.engine.runner.execute(plan)
            except Exception as error:
                hint = "search again, or for fewer prompts at once"
                raise engine_error("the model's forward pass failed", error, hint) from error
            for failure in result.errors.values():
                raise failure
            for item in plan.items:
                self.engine.events.record(Scheduled(item.sequence.seq_id, item.start, item.num_tokens))
                item.sequence.num_computed = item.context_len
                self.engine.kv.commit(item.sequence.seq_id, item.context_len, item.sequence.tokens)
            for search in list(self._running):
                if all(beam.seq_id in result.tokens for beam in search.beams):
                    self._choose(search, [result.tokens[beam.seq_id].top_logprobs for beam in search.beams])

    def close(self) -> None:
        """End the search and free what its beams hold. Nothing happens when it has ended."""
        with self.engine.exclusive.hold(wait=True):
            self.engine.exclusive.at_end(self._close)

    def _close(self) -> None:
        for search in self._running:
            self._free(search.beams)
        self._running.clear()
        self._waiting.clear()

    def outputs(self) -> list[BeamSearchOutput]:
        """Return what was found so far, in the prompts' order."""
        return [
            BeamSearchOutput([self._sequence(search, score, beam) for score, beam in search.selection.ended])
            for search in self._searches
        ]

    def _check_alone(self) -> None:
        if self.engine.has_unfinished_requests():
            raise EngineError("the engine has unfinished requests: let them end, or abort them, before a beam search.")

    def _checked(self, index: int, prompt: Prompt) -> _Search:
        params, engine = self.params, self.engine
        try:
            checked = engine.validate(prompt, SamplingParams())
            token_ids = tuple(checked["prompt_token_ids"])
            max_tokens = min(params.max_tokens, engine.max_model_len - len(token_ids))
            size = engine.kv.block_size
            shared = len(token_ids) // size
            # The last new token is never computed, so it needs no slot.
            each = -(-(len(token_ids) + max_tokens - 1) // size) - shared
            num_blocks = shared + params.beam_width * each
            if num_blocks > engine.kv.num_blocks:
                raise PromptTooLongError(
                    f"{shown(params.beam_width)} beams of {len(token_ids) + max_tokens} tokens may need "
                    f"{shown(num_blocks)} blocks, but the KV cache has {engine.kv.num_blocks}: shorten the prompt, "
                    "lower beam_width or max_tokens, or give the cache more memory."
                )
        except VllmTeachError as error:
            raise type(error)(f"prompts[{index}]: {error}") from error
        selection = BeamSelection(params, self._stop_ids, max_tokens)
        return _Search(token_ids, checked["cache_salt"] or "", selection, num_blocks)

    def _admit(self) -> None:
        """Take up waiting prompts, in order, while blocks and places for all their beams are left."""
        kv, width = self.engine.kv, self.params.beam_width
        while self._waiting:
            search = self._waiting[0]
            blocks = sum(other.num_blocks for other in self._running) + search.num_blocks
            if blocks > kv.num_blocks or (len(self._running) + 1) * width > self.engine.config.max_num_seqs:
                return
            sequence = self._new_sequence(search)
            cached = kv.begin(sequence.seq_id, search.token_ids, salt=search.salt)
            sequence.num_computed = sequence.num_cached_tokens = cached
            search.beams = [sequence]
            self._running.append(self._waiting.popleft())
            self.engine.events.record(Admitted(sequence.seq_id, cached))

    def _advance(self) -> tuple[ScheduledSequence, ...]:
        """Return the step's items: a token for each beam, and with what the budget leaves the prompts, in order."""
        kv = self.engine.kv
        items: list[ScheduledSequence] = []
        budget = self.engine.config.max_num_batched_tokens
        for beam in sorted(self.beams, key=lambda each: each.num_missing > 1):
            start = beam.num_tokens - beam.num_missing
            count = min(beam.num_missing, budget)
            if not count:
                break
            if not kv.extend(beam.seq_id, start + count):
                # With contiguous placement enough blocks may be free, but not next to one another.
                raise EngineError(
                    "the KV cache has no room left for a beam: close other searches, use kv_placement='scattered', or "
                    "search for fewer prompts at once."
                )
            items.append(ScheduledSequence(beam, start, count, kv.table(beam.seq_id).blocks))
            budget -= count
        return tuple(items)

    def _choose(self, search: _Search, rows: list[TopLogprobs]) -> None:
        """Let the beams go on that the rules choose: in the sequence that they continue, or forked off it."""
        parents, old = search.selection.advance(rows), search.beams
        if search.selection.done:
            self._running.remove(search)
            search.beams = []
            self._free(old)
            return
        # Forks first: they need their parents' tables as they are.
        search.beams = [
            old[parent] if parent not in parents[:place] else self._fork(search, old[parent])
            for place, parent in enumerate(parents)
        ]
        self._free([sequence for index, sequence in enumerate(old) if index not in parents])
        for sequence, beam in zip(search.beams, search.selection.live, strict=True):
            sequence.output_token_ids.append(beam.token_ids[-1])

    def _fork(self, search: _Search, parent: Sequence) -> Sequence:
        child = self._new_sequence(search)
        self.engine.kv.fork(parent.seq_id, child.seq_id)
        child.output_token_ids = list(parent.output_token_ids)
        child.num_computed = parent.num_computed
        self.engine.events.record(Forked(parent.seq_id, child.seq_id))
        return child

    def _free(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.engine.kv.free(sequence.seq_id)
            self.engine.events.record(Finished(sequence.seq_id, "beam"))

    def _new_sequence(self, search: _Search) -> Sequence:
        params = SamplingParams(temperature=0.0, logprobs=search.selection.num_candidates, detokenize=False)
        return Sequence(
            seq_id=next(self.engine.seq_ids),
            index=0,
            prompt_token_ids=search.token_ids,
            params=params,
            max_total_tokens=len(search.token_ids) + search.selection.max_tokens,
            stop_ids=frozenset(),
            random_source="beam search draws nothing",
            salt=search.salt,
        )

    def _sequence(self, search: _Search, score: float, beam: Beam) -> BeamSearchSequence:
        tokens = [*search.token_ids, *beam.token_ids]
        stop = beam.token_ids[-1] if beam.token_ids[-1] in self._stop_ids else None
        if stop is not None and not self.params.include_stop_str_in_output:
            tokens.pop()
        try:
            text = self.engine.tokenizer.decode(tokens)
        except Exception as error:
            raise engine_error("turning a beam's tokens into text failed", error, "check the tokenizer") from error
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=[{token: Logprob(*entry) for token, entry in row.items()} for row in beam.logprobs],
            cum_logprob=beam.cumulative_logprob,
            score=score,
            text=text,
            finish_reason="length" if stop is None else "stop",
            stop_reason=stop,
        )


def search_beams(
    engine: LLMEngine,
    prompts: list[Prompt],
    params: BeamSearchParams,
    on_step: Callable[[BeamSearch], object] | None = None,
) -> list[BeamSearchOutput]:
    """Return the texts that beam search finds for each prompt; `on_step(search)` is called after each step.

    Raises what `BeamSearch` and its `step` raise; however it ends, nothing of it stays in the cache but full blocks in
    the prefix cache.
    """
    with engine.exclusive.one_thread():
        search = BeamSearch(engine, prompts, params)
        try:
            while search.unfinished:
                search.step()
                if on_step is not None:
                    on_step(search)
        finally:
            search.close()
        return search.outputs()
