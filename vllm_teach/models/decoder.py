"""One decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3), driven by its `ModelConfig`.

The forward pass takes a flat batch: all scheduled tokens of all sequences behind one another, `[tokens]`, each with its
position in its own sequence. Only attention mixes tokens, and attention is the caller's (`models/attend.py`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import Attend
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.layers import MLP, Attention, DecoderLayer, Embedding, Linear, RMSNorm
from vllm_teach.models.rope import RotaryEmbedding
from vllm_teach.quantization.linear import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix
from vllm_teach.quantization.quantized_weight import QuantizedWeight


class _Body(nn.Module):
    """The modules that Hugging Face names `model.*`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The model: embedding, layers, final norm, and the output matrix (the embedding itself when tied).

    A new Decoder lies on PyTorch's `meta` device: it has shapes and names but no weights. The loader puts them in with
    `load_state_dict(..., assign=True)`; `init_random` fills them for tests and drawings.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = _Body(config)
            if not config.tie_word_embeddings:
                self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden state of each token, `[tokens, hidden_size]`, ready for `logits`.

        `token_ids` and `positions` are integer `[tokens]`; `attend` may store k and v, nothing here is mutated.
        """
        x, update = self.embed(token_ids), None
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.model.layers:
            x, update = cast("DecoderLayer", layer).carry(x, update, cos, sin, attend)
        normalised, _ = self.model.norm(x, update)
        return normalised

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of `token_ids` `[tokens]`, `[tokens, hidden_size]`."""
        return self.model.embed_tokens(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the score of each vocabulary entry, `[tokens, vocab_size]`, for `hidden` `[tokens, hidden_size]`."""
        return self.model.embed_tokens.logits(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states, and of the weights that are not quantised."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.norm.weight.device

    def num_parameters(self) -> int:
        """Return how many weights the model has, quantised or not, a tied matrix counted once."""
        plain = sum(parameter.numel() for parameter in self.parameters())
        return plain + sum(module.num_weights for module in self.modules() if isinstance(module, QuantizedMatrix))

    def num_bytes(self) -> int:
        """Return how many bytes the weights take, the scales and zeros of quantised ones included."""
        plain = sum(parameter.nbytes for parameter in self.parameters())
        # Joined layers share one packed weight.
        packed = {id(each.packed): each.packed for each in self.modules() if isinstance(each, QuantizedMatrix)}
        return plain + sum(each.num_bytes for each in packed.values())

    def put_quantized(self, name: str, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        """Replace the linear layer or embedding `name`, as "model.layers.0.mlp.up_proj", by one that has `weight`.

        A linear layer keeps its bias. `dtype` is the model's, in which an embedding's vectors come out. Raises
        InvalidArgumentError when there is no such layer, it is quantised already, or `weight` has not its shape.
        """
        parent, _, own_name = name.rpartition(".")
        try:
            layer = self.get_submodule(name)
        except AttributeError:
            layer = None
        if not isinstance(layer, Linear | Embedding):
            raise InvalidArgumentError(f"name={name!r} is no plain linear layer or embedding of this model: check it.")
        if weight.codes.shape != layer.weight.shape:
            found, needed = list(weight.codes.shape), list(layer.weight.shape)
            raise InvalidArgumentError(f"weight has shape {found}, but {name} has {needed}: give that layer's own.")
        new: QuantizedMatrix
        new = QuantizedLinear(weight, layer.bias) if isinstance(layer, Linear) else QuantizedEmbedding(weight, dtype)
        setattr(self.get_submodule(parent), own_name, new)

    def join_weights(self) -> Decoder:
        """Lay the weights of q, k and v together in each layer, for one product instead of three; return the model.

        Names and values stay; a layer's weights are there twice for a moment. For who is done loading and changing the
        weights: what is assigned or moved later is still right, but computed one by one. (Gate and up are joined only
        where they are quantised, for a kernel that goes on with both halves: otherwise their product is large enough to
        pay for itself, and its halves would be slower to go on with.)
        """
        for module in self.modules():
            if isinstance(module, Attention | MLP):
                module.join_weights()
        return self

    def init_random(self, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
        """Replace all weights by random ones (matrices N(0, 0.02), norms 1, biases 0) and return the model itself."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                weight = torch.ones(parameter.shape)
            elif name.endswith(".bias"):
                weight = torch.zeros(parameter.shape)
            else:
                weight = torch.randn(parameter.shape, generator=generator) * 0.02
            weights[name] = weight.to(dtype=dtype, device=device)
        self.load_state_dict(weights, assign=True)
        return self.eval().requires_grad_(False)
