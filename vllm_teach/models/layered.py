"""A `Decoder` one layer at a time, as quantisation reads and changes it (`quantization/layered_model.py`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import Attend, window_size
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layers import DecoderLayer
from vllm_teach.quantization.layered_model import LayerResult, Stage


class LayeredDecoder:
    """A decoder as a `LayeredModel`. `apply` writes into `decoder` itself; everything else leaves it as it is."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def num_layers(self) -> int:
        """How many layers the decoder has."""
        return self.decoder.config.num_layers

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states in front of layer 0, float32 `[samples, len, hidden]`, of ids `[samples, len]`.

        Raises InvalidArgumentError for ids that the vocabulary lacks, and for samples longer than the model's context.
        """
        config = self.decoder.config
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.vocab_size:
            raise InvalidArgumentError(
                f"token_ids holds {int(token_ids.min())} to {int(token_ids.max())}; this model's ids are 0 to "
                f"{config.vocab_size - 1}."
            )
        if token_ids.shape[1] > config.max_position:
            raise InvalidArgumentError(
                f"token_ids has samples of {token_ids.shape[1]} tokens; this model's context is "
                f"{config.max_position}: give shorter ones."
            )
        with torch.no_grad():
            return self.decoder.model.embed_tokens(token_ids.to(self.decoder.device)).float()

    def layer(self, index: int) -> WorkingDecoderLayer:
        """Return a float32 copy of layer `index`, as the decoder holds it now."""
        return WorkingDecoderLayer(self.decoder, index)

    def apply(self, result: LayerResult) -> None:
        """Copy the dequantised weights and the changed tensors of `result` into the decoder, IN PLACE."""
        parameters = dict(self.decoder.named_parameters())
        for name, weight in result.weights.items():
            parameters[f"{name}.weight"].data.copy_(weight.dequantize())
        for name, tensor in result.tensors.items():
            parameters[name].data.copy_(tensor)


class WorkingDecoderLayer:
    """A float32 copy of one layer of a decoder, as a `WorkingLayer`."""

    def __init__(self, decoder: Decoder, index: int) -> None:
        self._prefix = f"model.layers.{index}."
        self._dtype = decoder.dtype
        self._rotary = decoder.rotary
        original = decoder.model.layers[index]
        assert isinstance(original, DecoderLayer)
        self._layer = copy.deepcopy(original).float().requires_grad_(False)
        self.stages = _stages(self._prefix, decoder.config, decoder.device)

    def tensor(self, name: str) -> Tensor | None:
        """Return the parameter `name`, float32, not to be changed in place; None for a bias that is not there."""
        parameter = self._module(name)._parameters.get(name.rpartition(".")[2])
        return None if parameter is None else parameter.data

    def replace(self, name: str, tensor: Tensor) -> None:
        """Compute with `tensor` as the parameter `name` from now on, rounded to the decoder's dtype."""
        # What the decoder will hold once the layer is applied: so a run that was broken off goes on with the same.
        rounded = tensor.to(self._dtype).float()
        setattr(self._module(name), name.rpartition(".")[2], nn.Parameter(rounded, requires_grad=False))

    def walk(self, states: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of each stage and take `states` `[samples, len, hidden]` through the layer, IN PLACE."""
        # Not under torch.no_grad as a decorator, which would keep what was yielded last, of all samples' walks at once.
        layer, samples = self._layer, len(states)
        flat = states.view(-1, states.shape[-1])  # [tokens, hidden]
        positions = torch.arange(states.shape[1], device=states.device).repeat(samples)
        cos, sin = self._rotary(positions, torch.float32)
        attend = _side_by_side(samples)

        def mixed() -> Tensor:
            return layer.self_attn.mix(layer.input_layernorm(flat), cos, sin, attend)

        def widened() -> Tensor:
            return layer.mlp.widen(layer.post_attention_layernorm(flat))

        yield layer.input_layernorm(flat).unflatten(0, (samples, -1))
        yield mixed().unflatten(0, (samples, -1))
        # Computed once more, with what has been quantised in between, instead of kept for all samples.
        flat += layer.self_attn.o_proj(mixed())
        yield layer.post_attention_layernorm(flat).unflatten(0, (samples, -1))
        yield widened().unflatten(0, (samples, -1))
        flat += layer.mlp.down_proj(widened())

    def _module(self, name: str) -> nn.Module:
        return self._layer.get_submodule(name.removeprefix(self._prefix).rpartition(".")[0])


def _stages(prefix: str, config: ModelConfig, device: torch.device) -> tuple[Stage, ...]:
    hidden = torch.arange(config.hidden_size, device=device)
    # Head h of the output projection's inputs is made of the values of key/value head h // group.
    values = torch.arange(config.num_kv_heads * config.head_dim, device=device)  # v_proj's outputs
    group = config.num_q_heads // config.num_kv_heads
    read = values.view(-1, 1, config.head_dim).expand(-1, group, -1).flatten()  # [q_heads * head_dim]
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return (
        Stage(tuple(f"{attention}{each}_proj" for each in "qkv"), f"{prefix}input_layernorm", hidden),
        Stage((f"{attention}o_proj",), f"{attention}v_proj", read),
        Stage((f"{mlp}gate_proj", f"{mlp}up_proj"), f"{prefix}post_attention_layernorm", hidden),
        Stage((f"{mlp}down_proj",), f"{mlp}up_proj", torch.arange(config.intermediate_size, device=device)),
    )


def _side_by_side(samples: int) -> Attend:
    """Return an `attend` for equally long samples behind one another; a token sees its own sample's past."""
    from vllm_teach import backends

    sdpa = backends.get("sdpa")

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = (x.unflatten(0, (samples, -1)) for x in (q, k, v))  # [samples, len, heads, head_dim]
        return sdpa.run(q, k, v, causal=True, window_size=window_size(window)).flatten(0, 1)

    return attend
