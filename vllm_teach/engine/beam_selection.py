"""The rules of beam search for one prompt: which beams go on, which texts have ended, when to stop.

Knows no model and no cache: it is told the most likely next tokens of each beam and answers which beam goes on from
which. The rules are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.engine.beam_params import BeamSearchParams
from vllm_teach.engine.request import TopLogprobs


@dataclass(frozen=True)
class Beam:
    """The new tokens of one text, their log-probability, and for each what else could have stood there."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    logprobs: tuple[TopLogprobs, ...] = ()


class BeamSelection:
    """Grows `live`, at first the empty text alone, by one token a step, and collects in `ended` the best that ended.

    A text ends with one of `stop_ids` or at `max_tokens`. `ended` has (score, beam) pairs, the best score first.
    """

    def __init__(self, params: BeamSearchParams, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.params, self.stop_ids, self.max_tokens = params, stop_ids, max_tokens
        # Were every stop token among the best of each beam, so many more would still leave beam_width to go on with.
        self.num_candidates = (1 + max(1, len(stop_ids))) * params.beam_width
        self.live = [Beam()]
        self.ended: list[tuple[float, Beam]] = []
        self.done = False

    def advance(self, rows: Sequence[TopLogprobs]) -> list[int]:
        """Take the next token's log-probabilities for each of `live` and replace `live` by the beams that go on.

        A row has at least the `num_candidates` most likely tokens (or the whole vocabulary). Returns for each beam of
        the new `live` the index of the one it continues, whose tokens are its own but for the last.
        """
        candidates = [
            (beam.cumulative_logprob + logprob, parent, token_id)
            for parent, (beam, row) in enumerate(zip(self.live, rows, strict=True))
            for token_id, (logprob, _) in row.items()
        ]
        candidates.sort(key=lambda each: (-each[0], each[1], each[2]))
        going: list[tuple[int, Beam]] = []
        ending: list[Beam] = []
        for rank, (logprob, parent, token_id) in enumerate(candidates[: self.num_candidates]):
            before = self.live[parent]
            beam = Beam((*before.token_ids, token_id), logprob, (*before.logprobs, rows[parent]))
            if token_id not in self.stop_ids and len(beam.token_ids) < self.max_tokens:
                going.append((parent, beam))
            elif rank < self.params.beam_width:  # the others are there to fill the places of those that end
                ending.append(beam)
        going = going[: self.params.beam_width]
        self._collect(ending)
        self.live = [beam for _, beam in going]
        self.done = not self.live or self._enough()
        return [parent for parent, _ in going]

    def score(self, beam: Beam) -> float:
        """Return the log-probability of `beam`, divided as the length penalty wants it."""
        return beam.cumulative_logprob / len(beam.token_ids) ** self.params.length_penalty

    def _collect(self, beams: list[Beam]) -> None:
        """Add beams that ended; only the best `beam_width` stay, and of equals those that were there."""
        self.ended += [(self.score(beam), beam) for beam in beams]
        self.ended.sort(key=lambda each: -each[0])
        del self.ended[self.params.beam_width :]

    def _enough(self) -> bool:
        """Whether no beam that still grows is worth waiting for."""
        if len(self.ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        best, penalty = self.live[0], self.params.length_penalty
        # More tokens only lower the log-probability: what else helps it is to divide by the largest length.
        longest = self.params.early_stopping == "never" and penalty > 0
        length = self.max_tokens if longest else len(best.token_ids)
        return not best.cumulative_logprob / length**penalty > self.ended[-1][0]
