"""The requests: real text, lengths from one token to the longest, some prompts that share their beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError

_SHARED_STARTS = 2
_WHOLE_BLOCKS = 64  # tokens: a multiple of every block size tried
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Asked:
    """One request: its prompt's token ids, how many tokens it gets, and when, in steps of the engine, it arrives.

    It is greedy, or with a `seed` sampled `completions` times at temperature 0.8. End-of-sequence is ignored.
    """

    prompt: tuple[int, ...]
    num_outputs: int
    priority: int = 0
    arrival_step: int = 0
    completions: int = 1
    seed: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + self.num_outputs

    @property
    def temperature(self) -> float:
        """0 for greedy."""
        return 0.0 if self.seed is None else TEMPERATURE

    def params(self, logprobs: int | None = None) -> SamplingParams:
        """Return it as the engine's parameters."""
        return SamplingParams(
            n=self.completions,
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.num_outputs,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )


def longest(requests: Sequence[Asked]) -> int:
    """Return the tokens of the longest request, prompt and output."""
    return max(request.num_tokens for request in requests)


def draw_greedy(text_ids: Sequence[int], count: int, most_inputs: int, most_outputs: int, seed: int = 0) -> list[Asked]:
    """Return `count` greedy requests, the same for the same arguments on every machine.

    Prompt lengths are spread evenly on a logarithmic scale from 1 to `most_inputs`, output lengths from 1 to
    `most_outputs`, more of them long than short, in random order: all extremes are there, the longest prompt with
    the shortest output, so that the pool in which it fits is small. A prompt is a piece of
    `text_ids`, which goes on at its beginning; three of four start at one of two places, so that prefixes are shared,
    and some of these end with a block of any size. The first half is there from the start, the others come one every
    second step.
    """
    if count < 2 or not text_ids:
        raise InvalidArgumentError(f"count={count} of {len(text_ids)} text tokens: draw at least 2 from some text.")
    source = random.Random(seed)
    inputs = [round(most_inputs ** (index / (count - 1))) for index in range(count)]
    outputs = [round(1 + (most_outputs - 1) * (index / (count - 1)) ** 0.5) for index in range(count)]
    source.shuffle(inputs)
    source.shuffle(outputs)
    longest_prompt, shortest_output = inputs.index(most_inputs), outputs.index(1)
    swapped = outputs[longest_prompt], outputs[shortest_output]
    outputs[shortest_output], outputs[longest_prompt] = swapped
    starts = [source.randrange(len(text_ids)) for _ in range(_SHARED_STARTS)]
    requests = []
    for index, (length, num_outputs) in enumerate(zip(inputs, outputs, strict=True)):
        start = starts[index % _SHARED_STARTS] if index % 4 else source.randrange(len(text_ids))
        if index % 4 == 1 and _WHOLE_BLOCKS <= length < most_inputs:
            length -= length % _WHOLE_BLOCKS
        arrival = max(0, index - count // 2) * 2
        requests.append(Asked(_piece(text_ids, start, length), num_outputs, source.randrange(4), arrival))
    return requests


def draw_sampled(
    text_ids: Sequence[int], count: int, most_inputs: int, most_outputs: int, seed: int = 1
) -> list[Asked]:
    """Return `count` sampled requests of three completions each, of high priority, with more output than prompt.

    So they run side by side, and a small pool overflows as they grow. Every second prompt ends with a block of any size
    if it is long enough, so that the completions have nothing to copy; the others share a block that each must copy
    before it writes.
    """
    source = random.Random(seed)
    requests = []
    for index in range(count):
        length = source.randint(-(-most_inputs // 2), most_inputs)
        if index % 2 and length > _WHOLE_BLOCKS:
            length -= length % _WHOLE_BLOCKS
        piece = _piece(text_ids, source.randrange(len(text_ids)), length)
        num_outputs = source.randint(-(-most_outputs * 3 // 4), most_outputs)
        requests.append(Asked(piece, num_outputs, 0, index, 3, 1000 + index))
    return requests


def _piece(text_ids: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    return tuple(text_ids[(start + offset) % len(text_ids)] for offset in range(length))
