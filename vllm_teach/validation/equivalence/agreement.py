"""In a low precision rounding depends on the batch's shape: how often the reference would have chosen our token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_teach.engine.request import Request
from vllm_teach.validation.equivalence.reference import Reference, add_noise


@dataclass(frozen=True)
class Agreement:
    """Teacher-forced: each token is judged after OUR tokens before it, so that one difference counts once.

    `same` of `num_tokens` tokens are the reference's choice. The errors are of the chosen tokens' log-probabilities.
    """

    num_tokens: int
    same: int
    mean_error: float
    max_error: float

    @property
    def share(self) -> float:
        """The share of tokens that are the reference's choice."""
        return self.same / self.num_tokens


def measure_agreement(requests: Sequence[Request], truth: Reference, rival: Reference) -> tuple[Agreement, Agreement]:
    """Return how `requests`, and how `rival` on the same tokens, agree with `truth`.

    `rival` is transformers in our dtype, which says how much the dtype costs anyone. The requests must have been run
    with logprobs=0.
    """
    ours, theirs = _Tally(), _Tally()
    for request in requests:
        for stream in request.sequences:
            tokens, prompt = stream.output_token_ids, request.prompt_token_ids
            exact, rounded = truth.logits(prompt, tokens), rival.logits(prompt, tokens)
            chosen = torch.tensor(tokens)
            said = torch.tensor([each[token].logprob for each, token in zip(stream.logprobs, tokens, strict=True)])
            expected = add_noise(exact, stream).argmax(-1)
            true_logprobs = _logprobs_of(exact, chosen)
            ours.add(chosen == expected, said - true_logprobs)
            theirs.add(add_noise(rounded, stream).argmax(-1) == expected, _logprobs_of(rounded, chosen) - true_logprobs)
    return ours.result(), theirs.result()


def _logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


class _Tally:
    """Adds up tokens."""

    def __init__(self) -> None:
        self._same: list[Tensor] = []
        self._errors: list[Tensor] = []

    def add(self, same: Tensor, errors: Tensor) -> None:
        self._same.append(same)
        self._errors.append(errors.abs())

    def result(self) -> Agreement:
        same, errors = torch.cat(self._same), torch.cat(self._errors)
        return Agreement(len(same), int(same.sum()), float(errors.mean()), float(errors.max()))
