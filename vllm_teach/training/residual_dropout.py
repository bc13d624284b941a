"""Dropout where the Transformer has it (Vaswani et al. 2017, section 5.4): on each sub-layer's output, before the sum.

The decoder itself has none, since a model that only answers needs none. Hooks add it for as long as training lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layers import MLP, Attention, Embedding


@contextmanager
def residual_dropout(model: Decoder, p: float) -> Iterator[None]:
    """While the context lasts and `model` is in training mode, zero its embeddings and sub-layer outputs with `p`.

    The masks come from PyTorch's default generator.
    """

    def drop(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, p, training=module.training)

    with ExitStack() as hooks:
        for module in _dropped(model):
            hooks.callback(module.register_forward_hook(drop).remove)
        yield


def _dropped(model: Decoder) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Embedding | Attention | MLP)]
