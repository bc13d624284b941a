"""What a beam search is asked for and what it gives back: vLLM's `BeamSearchParams` and outputs, its field names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from vllm_teach.engine.failure import shown
from vllm_teach.engine.outputs import Logprob
from vllm_teach.engine.sampling_params import GREEDY_BELOW
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search. Every field is checked on construction; InvalidArgumentError names the bad one.

    - `beam_width`: how many beams go on after each step, and how many texts come out.
    - `max_tokens`: at most so many new tokens; `ignore_eos`: go on after end-of-sequence.
    - `temperature`: 0 only, since beam search ranks texts by the model's own log-probabilities and draws nothing.
    - `length_penalty`: a text's score is its log-probability divided by (its number of new tokens ** length_penalty):
      0 ranks by probability, which favours short texts; 1 by the mean per token. End-of-sequence counts as a token, the
      prompt does not (in vLLM the prompt does).
    - `include_stop_str_in_output`: leave end-of-sequence in `tokens` and `text`.
    - `early_stopping` (transformers'): True stops when `beam_width` texts have ended; False not before no beam, were
      it to end now, would be among the best; "never" not before none can get there any more.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                _refuse(name, value, "use a whole number from 1")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "use True or False")
        if not _is_number(self.temperature) or not 0 <= self.temperature < GREEDY_BELOW:
            _refuse("temperature", self.temperature, "beam search draws nothing, so use 0")
        if not _is_number(self.length_penalty):
            _refuse("length_penalty", self.length_penalty, "use a number (0: none)")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            _refuse("early_stopping", self.early_stopping, "use True, False or 'never'")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One text that beam search found.

    `tokens` are prompt and new tokens, `text` is their text, both without the end-of-sequence that ended it unless
    asked for. `cum_logprob` and `logprobs` are about all new tokens, that one included: a dict from token id to Logprob
    for each, of the most likely ones. `score` is what it was ranked by. `finish_reason` is "stop" or "length",
    `stop_reason` the token that ended it.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The texts found for one prompt, the best score first: `beam_width` of them, or all there are."""

    sequences: list[BeamSearchSequence]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(name: str, value: Any, hint: str) -> None:
    raise InvalidArgumentError(f"{name}={shown(value)} is not valid: {hint}.")
