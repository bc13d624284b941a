"""How to choose tokens and when to stop: vLLM's `SamplingParams`, its names, defaults and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_teach.engine.failure import shown
from vllm_teach.engine.field_checks import (
    check_flag,
    check_number,
    check_seed,
    check_whole,
    is_whole,
    is_within,
    refuse,
    take_plain_numbers,
)

GREEDY_BELOW = 1e-5
MOST_COMPLETIONS = 16_384  # vLLM's default limit
MOST_BIAS = 100  # OpenAI's and vLLM's
# Logits up to 1e23 stay within float32's range, which ends at 3.4e38, by these and the least temperature together.
LEAST_PENALTY, MOST_PENALTY = 1e-10, 1e10
MOST_TEMPERATURE = 1e38


@dataclass
class SamplingParams:
    """Parameters of one request. Every field is checked on construction; InvalidArgumentError names the bad one.

    - `n`: independent completions of the prompt, at most 16,384.
    - `temperature`: divides the logits; below 1e-5 the most likely token is taken (greedy). Any
      other, up to 1e38, is used as it is; vLLM raises what lies between 1e-5 and 0.01 to 0.01.
    - `top_k`: keep the k most likely tokens; 0 or -1 keeps all. `top_p`: then keep the fewest tokens whose probability
      reaches p. `min_p`: keep tokens at least min_p times as likely as the most likely one.
    - `presence_penalty`, `frequency_penalty`: subtracted from the logit of each token already generated, once or per
      occurrence. `repetition_penalty`: divides (negative: multiplies) the logit of each token in prompt or output. It
      lies between 1e-10 and 1e10, so that float32 holds the quotients.
    - `logit_bias`: token id -> what is added to its logit, from -100 to 100 (OpenAI's range), before the penalties.
    - `seed`: makes the request repeatable whatever runs beside it; None draws from the engine's own seed.
    - `stop`: strings that end the text; `stop_token_ids`: tokens that do; `ignore_eos`: go on after end-of-sequence.
    - `max_tokens`: at most so many new tokens; None means up to the model's context. `min_tokens`: none of the first
      so many tokens ends the request, neither as a stop token nor because its text completes a stop string.
    - `logprobs`: also return the log-probabilities of so many most likely tokens (-1: all) and of the chosen one, under
      the model's own distribution, before temperature, penalties or filters. `prompt_logprobs`: the same for each token
      of the prompt after its first; such a request computes its whole prompt, whatever the prefix cache has.
    - `detokenize`: turn tokens into text; `skip_special_tokens`; `include_stop_str_in_output`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_whole("n", self.n, 1, MOST_COMPLETIONS, hint=f"use a whole number from 1 to {MOST_COMPLETIONS}")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, hint="use a number from -2 to 2")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, hint="use a number from -2 to 2")
        hint = f"use a number from {LEAST_PENALTY:g} to {MOST_PENALTY:g} (1: off)"
        check_number("repetition_penalty", self.repetition_penalty, LEAST_PENALTY, MOST_PENALTY, hint=hint)
        check_number("temperature", self.temperature, 0.0, hint="use 0 for greedy decoding or a positive number")
        check_number("temperature", self.temperature, 0.0, MOST_TEMPERATURE, hint=f"use at most {MOST_TEMPERATURE:g}")
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True, hint="use a number above 0 and at most 1 (1: off)")
        check_whole("top_k", self.top_k, -1, hint="use a whole number from 1, or 0 or -1 to keep all tokens")
        check_number("min_p", self.min_p, 0.0, 1.0, hint="use a number from 0 (off) to 1")
        if self.seed is not None:
            check_seed(self.seed, "use a whole number of at most 64 bits or None")
            self.seed = None if self.seed == -1 else self.seed
        if self.max_tokens is not None:
            hint = "use a whole number from 1, or None for the whole context"
            check_whole("max_tokens", self.max_tokens, 1, hint=hint)
        check_whole("min_tokens", self.min_tokens, 0, hint="use a whole number from 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"use at most max_tokens, which is {shown(self.max_tokens)}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                hint = "use a whole number from 0, -1 for all tokens, or None"
                check_whole(name, getattr(self, name), -1, hint=hint)
        self._check_bias()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))
        self._check_stops()
        if self.n > 1 and self.greedy:
            refuse("n", self.n, "greedy decoding has one result, so use n=1 or a temperature above 0")

    def _check_stops(self) -> None:
        """Normalise `stop` and `stop_token_ids` to lists of their own."""
        stops = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
            refuse("stop", self.stop, "use a string or a list of strings, none of them empty")
        self.stop = list(stops)
        if self.stop and not self.detokenize:
            refuse("detokenize", False, "stop strings are looked for in the text, so leave it True or give no stop")
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, list | tuple) or not all(is_whole(token_id) and token_id >= 0 for token_id in ids):
            refuse("stop_token_ids", ids, "use a list of token ids, which are whole numbers from 0")
        self.stop_token_ids = [int(token_id) for token_id in ids]

    def _check_bias(self) -> None:
        """Turn `logit_bias` into a dict of its own, from int to float; an empty one into None."""
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            refuse("logit_bias", self.logit_bias, "use a dict from token id to a number")
        bias: dict[int, float] = {}
        for token_id, value in self.logit_bias.items():
            if not is_whole(token_id) or token_id < 0 or not is_within(value, -MOST_BIAS, MOST_BIAS):
                hint = f"use a dict from token ids, which are whole numbers from 0, to numbers from -{MOST_BIAS} to "
                refuse("logit_bias", self.logit_bias, hint + str(MOST_BIAS))
            bias[int(token_id)] = float(value)
        self.logit_bias = bias or None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list it is after construction."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """Return every token that ends a sequence of this request."""
        return frozenset(self.stop_token_ids or ()) | frozenset(() if self.ignore_eos else eos_token_ids)

    def copy(self) -> SamplingParams:
        """Return a checked copy, so that a later change to this object changes no running request."""
        return replace(self)
