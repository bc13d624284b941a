"""What a beam search is asked for and what it gives back: vLLM's `BeamSearchParams` and outputs, its field names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_teach.engine.field_checks import check_flag, check_number, check_whole, is_within, refuse, take_plain_numbers
from vllm_teach.engine.outputs import Logprob
from vllm_teach.engine.sampling_params import GREEDY_BELOW

# The longest text's length to this power is a float64 still.
MOST_LENGTH_PENALTY = 32


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
        take_plain_numbers(self)
        check_whole("beam_width", self.beam_width, 1)
        check_whole("max_tokens", self.max_tokens, 1)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        if not is_within(self.temperature, 0) or self.temperature >= GREEDY_BELOW:
            refuse("temperature", self.temperature, "beam search draws nothing, so use 0")
        most = MOST_LENGTH_PENALTY
        check_number("length_penalty", self.length_penalty, -most, most, hint=f"use a number from -{most} to {most}")
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            refuse("early_stopping", self.early_stopping, "use True, False or 'never'")


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
