"""Which share of a decoder's forward pass is attention: by arithmetic, by the clock, by memory.

"Attention" is softmax(Q K^T) V alone, the part that grows with the square of the sequence; the projections to q, k, v
and back are linear layers like those of the MLP, and count as the rest. Weights are random: shares depend on shapes,
not on values, so any width can be tried.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import Attend, full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance.memory import region, trace_memory
from vllm_teach.performance.timing import check_calls


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one decoder layer (Llama's: RMSNorm, attention with grouped heads, SwiGLU), in elements."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> "LayerShape":
        """Take the sizes from a model's config."""
        return cls(
            config.hidden_size, config.intermediate_size, config.num_q_heads, config.num_kv_heads, config.head_dim
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of the layer's seven matrices: q, k, v, o, gate, up, down."""
        heads = 2 * self.num_q_heads + 2 * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)


SMOLLM2_135M = LayerShape(576, 1536, 9, 3, 64)
LLAMA2_7B = LayerShape(4096, 11008, 32, 32, 128)


@dataclass(frozen=True)
class Share:
    """Attention's part of one measured forward pass over `n` tokens.

    `time_share` is the median of its share of the seconds. `memory_share` is its share of the intermediate bytes alive
    at the moment of the peak, and `allocated_share` its share of all intermediate bytes that the pass allocated, alive
    at once or not (what a training step without recomputation would have to keep). Weights are no intermediates.
    `time_shares` are those of the repetitions.
    """

    n: int
    time_share: float
    attention_seconds: float
    total_seconds: float
    memory_share: float
    allocated_share: float
    attention_peak_bytes: int
    peak_bytes: int
    time_shares: tuple[float, ...] = ()


def flop_share(n: float, shape: LayerShape, *, skip_masked: bool = False) -> float:
    """Return attention's exact share of the FLOPs of one layer over `n` tokens without a cache.

    Linear layers take 2 x parameters x n, attention 4 x n^2 x q_heads x head_dim: two products, two FLOPs each. The
    naive implementation computes the masked half of the square too; `skip_masked` counts n (n + 1) / 2 pairs instead.
    Softmax, norms and activations (below 1 %) are left out. Source: Kaplan et al. (2020), table 1.
    """
    _check_length(n)
    pairs = n * (n + 1) / 2 if skip_masked else n * n
    attention = 4 * pairs * shape.num_q_heads * shape.head_dim
    return attention / (attention + 2 * shape.linear_parameters * n)


def flop_crossing(share: float, shape: LayerShape) -> float:
    """Return the length n at which `flop_share(n, shape)` reaches `share`, a number between 0 and 1.

    From 4 n^2 w / (2 p n) = share / (1 - share), with w = q_heads x head_dim and p the layer's parameters.
    """
    if not 0 < share < 1:
        raise InvalidArgumentError(f"share={share} is never crossed: use a number between 0 and 1.")
    return share / (1 - share) * shape.linear_parameters / (2 * shape.num_q_heads * shape.head_dim)


def measure_share(
    n: int,
    shape: LayerShape,
    *,
    backend: str = "naive",
    repeats: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    model: Decoder | None = None,
) -> Share:
    """Run one decoder layer with random weights over `n` tokens and return attention's share of time and memory.

    `model` measures that model (all its layers) instead, and `shape`, `dtype` and `device` are then ignored. Memory is
    measured on a CPU only; on CUDA the two memory shares are NaN and the byte counts 0. Raises InvalidArgumentError
    when `n` or `repeats` is below 1, or the backend has no such name.
    """
    check_calls("n", n, 1, "is no sequence length")
    check_calls("repeats", repeats, 1, "measures nothing")
    decoder = model if model is not None else _one_layer(n, shape, dtype, device)
    token_ids = torch.zeros(n, dtype=torch.long, device=decoder.device)
    positions = torch.arange(n, device=decoder.device)
    meter = _Meter(full_causal(backend), decoder.device)
    with torch.inference_mode():
        # The first pass warms up: on a CPU it is the one whose memory is traced, as tracing makes it slower anyway.
        memory = _memory(lambda: decoder(token_ids, positions, meter.attend)) if meter.on_cpu else _NO_MEMORY
        if not meter.on_cpu:
            decoder(token_ids, positions, meter.attend)
        samples = [meter.run(lambda: decoder(token_ids, positions, meter.attend)) for _ in range(repeats)]
    return Share(
        n,
        statistics.median(attention / total for attention, total in samples),
        statistics.median(attention for attention, _ in samples),
        statistics.median(total for _, total in samples),
        *memory,
        time_shares=tuple(attention / total for attention, total in samples),
    )


class _Meter:
    """Wraps an `attend`, adding up the seconds spent in it."""

    def __init__(self, attend: Attend, device: torch.device) -> None:
        self.inner, self.on_cpu, self.seconds = attend, device.type == "cpu", 0.0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None = None
    ) -> torch.Tensor:
        start = self._now()
        with region("attention"):
            out = self.inner(layer, q, k, v, window=window)
        self.seconds += self._now() - start
        return out

    def run(self, forward: Callable[[], object]) -> tuple[float, float]:
        """Return (attention's seconds, all seconds) of one forward pass."""
        self.seconds, start = 0.0, self._now()
        forward()
        return self.seconds, self._now() - start

    def _now(self) -> float:
        if not self.on_cpu:
            torch.cuda.synchronize()
        return time.perf_counter()


# memory_share, allocated_share, attention_peak_bytes, peak_bytes
_Memory = tuple[float, float, int, int]
_NO_MEMORY: _Memory = (float("nan"), float("nan"), 0, 0)


def _memory(forward: Callable[[], object]) -> _Memory:
    trace = trace_memory(forward, {"attention"})
    at_peak, ever = trace.at_peak["attention"], trace.allocated["attention"]
    return at_peak / trace.peak, ever / sum(trace.allocated.values()), at_peak, trace.peak


def _one_layer(n: int, shape: LayerShape, dtype: torch.dtype, device: str) -> Decoder:
    """A decoder of one layer; a vocabulary of 8 keeps the embedding out of the picture."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=1,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=n,
        tie_word_embeddings=True,
    )
    return Decoder(config).init_random(dtype=dtype, device=device)


def _check_length(n: float) -> None:
    if n < 1:
        raise InvalidArgumentError(f"n={n} is no sequence length: use 1 or more.")
