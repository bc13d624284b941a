"""The parts of one decoder layer: RMSNorm, attention with grouped key/value heads, SwiGLU.

Parameter names equal Hugging Face's, so that a checkpoint loads by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_teach.models.attend import Attend
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.rope import rotate


class Linear(nn.Linear):
    """A linear layer that draws no random weights: the loader brings them (drawing on `meta` would import sympy)."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """An embedding that draws no random weights, for the same reason."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by a learnt weight (Zhang and Sennrich 2019).

    The mean is taken in float32 whatever the input's dtype: a bf16 sum of squares loses the small terms.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x` `[..., size]`; the result has `x`'s dtype."""
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps)  # rounded to the dtype before the weight


class Together:
    """Linear layers that read one input, computed as one matrix product once `join` has laid their weights together.

    They stay layers and parameters of their own, under their own names: their weights become views into one tensor. A
    product that trains, or whose weights were replaced or moved since, is computed layer by layer.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int]] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def join(self, *layers: Linear) -> None:
        """Move the weights, and biases where there are some, behind one another. In between they are there twice."""
        if self._weight is not None and self._in_place():
            return
        self._parts = []
        self._weight = self._join("weight", layers)
        self._bias = None if layers[0].bias is None else self._join("bias", layers)

    def __call__(self, x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
        """Return what each of `layers`, in the order in which they were joined, makes of `x` `[tokens, size]`."""
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
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim))  # [tokens, q_heads, head_dim], [tokens, kv_heads, head_dim] twice
            for each in self.qkv(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # The window is passed only where there is one, so that an `attend` that knows none fails aloud on such a layer.
        out = attend(self.layer, q, k, v) if self.window is None else attend(self.layer, q, k, v, window=self.window)
        return self.o_proj(out.flatten(-2))

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
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
