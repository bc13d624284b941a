"""How good a model is at a text, by several measures at once: what "loses 2 %" can mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.quantization.sliding_window import windows


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
        Raises InvalidArgumentError for another number of tokens.
        """
        if len(self.nlls) != len(reference.nlls):
            raise InvalidArgumentError(
                f"reference has {len(reference.nlls)} tokens for {len(self.nlls)}: measure both on the same text."
            )
        return {
            "perplexity": 100 * (self.perplexity / reference.perplexity - 1),
            "nats a token": 100 * (float(self.nlls.mean() / reference.nlls.mean()) - 1),
            "right tokens": 100 * (1 - self.accuracy / reference.accuracy),
            "other choices": 100 * float((self.chosen != reference.chosen).double().mean()),
        }


def measure_quality(decoder: Decoder, token_ids: Tensor, *, window: int = 512) -> Quality:
    """Return how good `decoder` is at `token_ids`, int64 `[tokens]`.

    Read through windows of `window` tokens in steps of three quarters, as `quantization.perplexity` does.
    """
    hidden, head = decoder_parts(decoder)
    nlls, chosen = [], []
    with torch.inference_mode():
        for start, first, end in windows(len(token_ids), window, window * 3 // 4):
            rows = hidden(token_ids[start:end])[first - 1 - start : end - 1 - start]
            logits = head(rows).float()  # [scored, vocab]
            targets = token_ids[first:end]
            nlls.append(-logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].double())
            chosen.append(logits.argmax(-1))
    best = torch.cat(chosen)
    return Quality(torch.cat(nlls), best, best == token_ids[1:])
