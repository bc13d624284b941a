"""A mix of requests for throughput measurements: real text, lengths drawn from a seed, no end before its time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from vllm_teach.engine.outputs import RequestOutput
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineError, InvalidArgumentError

INPUTS, OUTPUTS = (16, 512), (16, 256)
_REQUEST_BYTES = 100  # of a tuple and its place, beside 8 for each token


@dataclass(frozen=True)
class Workload:
    """Requests that are all there from the start: each prompt's token ids, and how many tokens each is to get.

    End-of-sequence is ignored: who serves a request computes exactly its output length.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self.prompts)

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """The useful tokens: what the requests asked for, without what a padded batch computes on top."""
        return sum(self.output_lens)

    def part(self, indices: Sequence[int]) -> Workload:
        """Return the requests with these indices, in this order."""
        return Workload(tuple(self.prompts[i] for i in indices), tuple(self.output_lens[i] for i in indices))

    def sampling_params(self) -> list[SamplingParams]:
        """Return what `LLM.generate` is to do with each prompt: greedily, to its full length, and no text."""
        return [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in self.output_lens
        ]

    def check_served(self, outputs: Sequence[RequestOutput]) -> None:
        """Raise EngineError if a request got another length than it asked for."""
        if tuple(len(output.outputs[0].token_ids) for output in outputs) != self.output_lens:
            raise EngineError("the engine ended requests before their last token: its seconds say nothing.")


def draw_workload(
    text_ids: Sequence[int],
    count: int = 64,
    *,
    inputs: tuple[int, int] = INPUTS,
    outputs: tuple[int, int] = OUTPUTS,
    seed: int = 0,
) -> Workload:
    """Draw `count` requests with prompt and output lengths uniform between the bounds, which are included.

    A prompt is a piece of `text_ids`, from a place drawn too, and goes on at the beginning where the text ends. The
    same seed and text give the same requests on every machine. Raises InvalidArgumentError for bounds that are no
    lengths, for an empty text, and for requests that the memory does not hold.
    """
    if count < 1:
        raise InvalidArgumentError(f"count={count} is not valid: draw at least one request.")
    for name, (low, high) in (("inputs", inputs), ("outputs", outputs)):
        if not 1 <= low <= high:
            raise InvalidArgumentError(
                f"{name}=({low}, {high}) are no lengths: give two numbers from 1, the less first."
            )
    if count * (_REQUEST_BYTES + 8 * sum(inputs) // 2) > psutil.virtual_memory().available:
        raise InvalidArgumentError(
            f"count={count} requests with prompts of up to {inputs[1]} tokens do not fit into memory: use fewer."
        )
    if not text_ids:
        raise InvalidArgumentError("text_ids is empty: give the token ids of some text.")
    source = random.Random(seed)
    prompts, output_lens = [], []
    for _ in range(count):
        start = source.randrange(len(text_ids))
        length = source.randint(*inputs)
        prompts.append(tuple(text_ids[(start + i) % len(text_ids)] for i in range(length)))
        output_lens.append(source.randint(*outputs))
    return Workload(tuple(prompts), tuple(output_lens))
