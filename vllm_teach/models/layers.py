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
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


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
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map `x` `[tokens, hidden_size]` to the same shape; `cos` and `sin` are `[tokens, 1, head_dim // 2]`."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [tokens, q_heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [tokens, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # The window is passed only where there is one, so that an `attend` that knows none fails aloud on such a layer.
        out = attend(self.layer, q, k, v) if self.window is None else attend(self.layer, q, k, v, window=self.window)
        return self.o_proj(out.flatten(-2))


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
