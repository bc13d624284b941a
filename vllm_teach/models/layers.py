"""The parts of one decoder layer: RMSNorm, attention with grouped key/value heads, SwiGLU.

Parameter names equal Hugging Face's, so that a checkpoint loads by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_teach.kernels import norms
from vllm_teach.models.attend import Attend
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.rope import rotate
from vllm_teach.quantization.linear import QuantizedLinear, gated, join, together


class Linear(nn.Linear):
    """A linear layer that draws no random weights: the loader brings them (drawing on `meta` would import sympy)."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """An embedding that draws no random weights, for the same reason. It serves as output matrix, too."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` `[tokens, hidden_size]` times the transposed matrix: `[tokens, vocab_size]`."""
        return F.linear(hidden, self.weight)


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by a learnt weight (Zhang and Sennrich 2019).

    The mean is taken in float32 whatever the input's dtype: a bf16 sum of squares loses the small terms.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last dimension of `x` `[..., size]`; the result has `x`'s dtype.

        With an `update` of `x`'s shape, return the normalised `x + update`, and that sum as well.
        """
        if update is None:
            return norms.rms_norm(x, self.weight, self.eps)
        return norms.add_rms_norm(x, update, self.weight, self.eps)


class Together:
    """Linear layers that read one input, computed as one matrix product once `join` has laid their weights together.

    They stay layers and parameters of their own, under their own names: their weights become views into one tensor. A
    product that trains, or whose weights were replaced or moved since, is computed layer by layer; so is one of which
    some layers are quantised and some are not.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int]] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def join(self, *layers: Linear | QuantizedLinear) -> None:
        """Move the weights, and biases where there are some, behind one another. In between they are there twice."""
        quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
        plain = [layer for layer in layers if isinstance(layer, Linear)]
        if not plain:
            join(*quantized)
        elif not quantized:
            self._join_plain(*plain)

    def _join_plain(self, *layers: Linear) -> None:
        if self._weight is not None and self._in_place():
            return
        self._parts = []
        self._weight = self._join("weight", layers)
        self._bias = None if layers[0].bias is None else self._join("bias", layers)

    def __call__(self, x: Tensor, *layers: Linear | QuantizedLinear) -> tuple[Tensor, ...]:
        """Return what each of `layers`, in the order in which they were joined, makes of `x` `[tokens, size]`."""
        quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
        if len(quantized) == len(layers):
            return together(x, *quantized)
        if self._weight is None or not self._in_place():
            return tuple(layer(x) for layer in layers)
        return F.linear(x, self._weight, self._bias).split([layer.out_features for layer in layers], dim=-1)

    def _join(self, name: str, layers: tuple[Linear, ...]) -> Tensor:
        parts = [layer._parameters[name] for layer in layers]
        held = [part for part in parts if part is not None]
        joined = torch.cat([part.detach() for part in held])
        for layer, part, piece in zip(layers, held, joined.split([len(part) for part in held]), strict=True):
            part.data = piece
            self._parts.append((layer._parameters, name, part, part.data_ptr()))
        return joined

    def _in_place(self) -> bool:
        trains = torch.is_grad_enabled() and self._parts[0][2].requires_grad
        return not trains and all(
            held[name] is part and part.data_ptr() == address for held, name, part, address in self._parts
        )


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[tokens, hidden_size]` to the same shape."""
        return self.down_proj(self.widen(x))

    def widen(self, x: Tensor) -> Tensor:
        """Return what `down_proj` reads, `[tokens, intermediate_size]`."""
        if isinstance(self.gate_proj, QuantizedLinear) and isinstance(self.up_proj, QuantizedLinear):
            return gated(x, self.gate_proj, self.up_proj)
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def join_weights(self) -> None:
        """See `Decoder.join_weights`."""
        if isinstance(self.gate_proj, QuantizedLinear) and isinstance(self.up_proj, QuantizedLinear):
            join(self.gate_proj, self.up_proj)


class Attention(nn.Module):
    """Project to q, k and v, turn q and k by their positions, let `attend` mix the tokens, project back.

    Which keys a token sees, where they are kept and which implementation computes it is `attend`'s business.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.window(layer)
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.qkv = Together()
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map `x` `[tokens, hidden_size]` to the same shape; `cos` and `sin` are `[tokens, 1, head_dim // 2]`."""
        return self.o_proj(self.mix(x, cos, sin, attend))

    def mix(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return what `o_proj` reads, `[tokens, q_heads * head_dim]`: what each token's heads read."""
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim))  # [tokens, q_heads, head_dim], [tokens, kv_heads, head_dim] twice
            for each in self.qkv(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # The window is passed only where there is one, so that an `attend` that knows none fails aloud on such a layer.
        out = attend(self.layer, q, k, v) if self.window is None else attend(self.layer, q, k, v, window=self.window)
        return out.flatten(-2)

    def join_weights(self) -> None:
        """See `Decoder.join_weights`."""
        self.qkv.join(self.q_proj, self.k_proj, self.v_proj)


class DecoderLayer(nn.Module):
    """Attention, then the MLP; each reads a normalised copy and adds its result to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map `x` `[tokens, hidden_size]` to the same shape."""
        x, update = self.carry(x, None, cos, sin, attend)
        return x + update

    def carry(
        self, x: Tensor, update: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and what has still to be added to it, each `[tokens, hidden_size]`.

        So are `x` and `update`, which the layer before returned; in front of the first layer, `update` is None. An
        addition is left to the norm that follows it, which reads the stream anyway.
        """
        if update is None:
            normalised = self.input_layernorm(x)
        else:
            normalised, x = self.input_layernorm(x, update)
        update = self.self_attn(normalised, cos, sin, attend)
        normalised, x = self.post_attention_layernorm(x, update)
        return x, self.mlp(normalised)
