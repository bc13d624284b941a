"""How good a model is at a text, by several measures at once: what "loses 2 %" can mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.quantization.sliding_window import check_window, perplexity


@dataclass(frozen=True, eq=False)
class Quality:
    """What a model says of each token of a text but the first.

    `nlls`, float64 `[tokens]`, are -ln p of the tokens; `chosen`, int64 `[tokens]`, what greedy decoding would have
    written there; `right`, bool `[tokens]`, whether that is the text's own token.
    """

    nlls: Tensor
    chosen: Tensor
    right: Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean of `nlls`."""
        return float(self.nlls.mean().exp())

    @property
    def accuracy(self) -> float:
        """The share of tokens that greedy decoding gets right, 0 to 1."""
        return float(self.right.double().mean())

    def losses(self, reference: Quality) -> dict[str, float]:
        """Return {measure: percent lost against `reference`}; negative where this model is the better one.

        "perplexity" and "nats a token" are how much they grow, "right tokens" how many fewer there are, each as a
        share of the reference's; "other choices" is the share of tokens at which greedy decoding writes another one.
        Raises InvalidArgumentError for another number of tokens, and for a reference that gets no token right.
        """
        if len(self.nlls) != len(reference.nlls):
            raise InvalidArgumentError(
                f"reference has {len(reference.nlls)} tokens for {len(self.nlls)}: measure both on the same text."
            )
        if not reference.right.any():
            raise InvalidArgumentError(
                f"reference gets none of {len(reference.right)} tokens right, so there is no share of them to lose: "
                "measure both on more text."
            )
        return {
            "perplexity": 100 * (self.perplexity / reference.perplexity - 1),
            "nats a token": 100 * (float(self.nlls.mean() / reference.nlls.mean()) - 1),
            "right tokens": 100 * (1 - self.accuracy / reference.accuracy),
            "other choices": 100 * float((self.chosen != reference.chosen).double().mean()),
        }


def measure_quality(decoder: Decoder, token_ids: Tensor, *, window: int = 512) -> Quality:
    """Return how good `decoder` is at `token_ids`, int64 `[tokens]`.

    Read through windows of `window` tokens in steps of three quarters. Raises InvalidArgumentError as
    `quantization.perplexity` does, and for a `window` beyond the model's context.
    """
    window = check_window(window, decoder.config.max_position)
    hidden, head = decoder_parts(decoder)
    chosen: list[Tensor] = []

    def choosing(states: Tensor) -> Tensor:
        logits = head(states)  # [scored, vocab]
        chosen.append(logits.argmax(-1).cpu())
        return logits

    scored = perplexity(hidden, token_ids, window=window, stride=window * 3 // 4, head=choosing)
    best = torch.cat(chosen)
    return Quality(scored.nlls, best, best == token_ids[1:].cpu())
