"""What the engine asks of a model: `Decoder` and `HuggingFaceModel` both offer it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_teach.models.attend import Attend
from vllm_teach.models.config import ModelConfig


class LanguageModel(Protocol):
    """A causal language model that leaves attention, and so the cache, to its caller."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model, which the cache follows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and of keys and values."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden state `[tokens, hidden_size]` of each token of a flat batch."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the score of each vocabulary entry, `[tokens, vocab_size]`, for `hidden` `[tokens, hidden_size]`."""
        ...
