"""The work of each kind of operator in one step of the decoder: FLOPs, bytes, and how many calls make them.

The memory model is `counters`': a call reads each tensor it is given once and writes each that it makes once. FLOPs are
those of matrix products, two for each multiply-add. With tensor parallelism it is the work of the rank that has the
most (`models.shard`), and what goes over the link between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_teach.models.config import ModelConfig
from vllm_teach.models.shard import Shard
from vllm_teach.performance.cost_model.attention_work import AttentionLayer, Work, check_algorithm
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.weight_format import WeightFormat, element_bytes, get_weight_format

# What runs on the device, in the order of a step; "transfers" and "communication" go over links.
OPERATORS = (
    "embedding",
    "norms",
    "linear layers",
    "rotary",
    "cache writes",
    "decode attention",
    "prefill attention",
    "activations",
    "logits",
    "sampling",
)
_SAMPLING_CALLS = 4  # convert, look for NaN, argmax, to the host
_FLOAT32 = 4


class Operators:
    """Counts the work of steps of a model with `config`, computed in `dtype`, by `tensor_parallel_size` devices alike.

    `weights` is how linear layers are stored (embedding and output matrix are in `dtype`), None for `dtype`.
    `attention` is one of ALGORITHMS. Raises InvalidArgumentError for what is not known, and for a model that cannot be
    cut into so many parts.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: str = "bfloat16",
        weights: WeightFormat | None = None,
        attention: str = "paged",
        tensor_parallel_size: int = 1,
    ) -> None:
        check_algorithm(attention)
        self.config, self.size = config, tensor_parallel_size
        self.element = element_bytes(dtype)
        self.weights = get_weight_format(None, dtype) if weights is None else weights
        shard = Shard.of(config, 0, tensor_parallel_size, self.weights.unit)
        local, self.vocabulary = shard.config, len(shard.vocabulary)
        self.local = local
        self._hidden, self._inner, self._layers = local.hidden_size, local.intermediate_size, local.num_layers
        self._q, self._kv = local.num_q_heads * local.head_dim, local.num_kv_heads * local.head_dim
        self.layer_weights = sum(rows * columns for rows, columns in self.matrices())
        self.layer_bytes = sum(self.weights.matrix_bytes(*matrix) for matrix in self.matrices())
        heads = (attention, local.num_q_heads, local.num_kv_heads, local.head_dim, self.element)
        sliding = sum(local.sliding_layers)
        self._attention = [
            (layer, count)
            for layer, count in (
                (AttentionLayer(*heads), self._layers - sliding),
                (AttentionLayer(*heads, local.sliding_window), sliding),
            )
            if count
        ]
        self._naive = attention == "naive"

    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Return (rows, columns) of a layer's matrices on one device: q, k and v together, o, gate and up, down."""
        hidden, inner = self.local.hidden_size, self.local.intermediate_size
        q, kv = (heads * self.local.head_dim for heads in (self.local.num_q_heads, self.local.num_kv_heads))
        return (q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)

    def work(self, shape: StepShape) -> dict[str, Work]:
        """Return the work of one step by kind of operator; kinds that have none are left out."""
        return {kind: work for kind, work in self._works(shape) if work.num_bytes}

    def _works(self, shape: StepShape) -> Iterator[tuple[str, Work]]:
        if shape.tokens:
            yield from self._of_tokens(shape.tokens)
            yield from self._of_attention(shape)
        if shape.samples:
            size, rows = self.element, shape.samples * self.vocabulary
            read = self.vocabulary * self._hidden * size + (shape.samples * self._hidden + rows) * size
            yield "logits", Work(2.0 * rows * self._hidden, float(read), 1)
            converted = (size + _FLOAT32 if size < _FLOAT32 else 0) + 2 * _FLOAT32
            yield "sampling", Work(0.0, float(shape.samples * self.config.vocab_size * converted), _SAMPLING_CALLS)

    def _of_tokens(self, tokens: int) -> Iterator[tuple[str, Work]]:
        hidden, inner, q, kv, layers = self._hidden, self._inner, self._q, self._kv, self._layers
        row = tokens * self.element  # bytes of a column of one number a token
        yield "embedding", Work(0.0, 2.0 * row * hidden, 1)
        normed = 4 * layers * hidden * 2 + 2 * hidden  # all but the first add the residual: two read, two written
        norms, qk = 2 * layers + 1, self.config.qk_norm * layers
        yield "norms", Work(0.0, row * (normed + 2.0 * qk * (q + kv)) + norms * hidden * self.element, norms + 2 * qk)
        # Plain gate and up read their input once each and write two tensors; quantised ones are one kernel that writes
        # their gated product.
        fused = self.weights.quantized
        rows = hidden * (2 if fused else 3) + q + inner + q + 2 * kv + inner * (1 if fused else 2) + 2 * hidden
        products = Work(
            2.0 * tokens * self.layer_weights * layers,
            float(layers * (self.layer_bytes + row * rows)),
            (4 if fused else 5) * layers,
        )
        yield "linear layers", products
        yield "rotary", Work(0.0, 2.0 * row * (q + kv) * layers, 2 * layers)
        yield "cache writes", Work(0.0, 4.0 * row * kv * layers, 2 * layers)
        if not fused:  # silu reads and writes a tensor, the product reads two and writes one
            yield "activations", Work(0.0, 5.0 * row * inner * layers, 2 * layers)

    def _of_attention(self, shape: StepShape) -> Iterator[tuple[str, Work]]:
        """One call a layer serves them all; it is counted where there are chunks."""
        singles = chunks = (0.0, 0.0)
        for layer, count in self._attention:
            if shape.singles:
                keys = shape.keys if layer.window is None or self._naive else shape.window_keys
                singles = _plus(singles, layer.singles(shape.singles, keys), count)
            for start, length in shape.chunks:
                chunks = _plus(chunks, layer.chunk(start, length), count)
        calls = self._layers * (3 if self._naive else 1)  # the naive one: scores, softmax, values
        if shape.singles:
            yield "decode attention", Work(*singles, 0 if shape.chunks and not self._naive else calls)
        if shape.chunks:
            yield "prefill attention", Work(*chunks, calls)

    def all_reduced(self, shape: StepShape) -> tuple[int, int]:
        """Return (calls, bytes) of the sums over all ranks in one step: the embedding's, and two a layer."""
        if self.size == 1 or not shape.tokens:
            return 0, 0
        calls = 1 + 2 * self._layers
        return calls, calls * shape.tokens * self._hidden * self.element

    def gathered_bytes(self, shape: StepShape) -> int:
        """Return the bytes of logits that each other rank sends to the first one in a step."""
        return 0 if self.size == 1 else shape.samples * self.vocabulary * self.element


def _plus(total: tuple[float, float], more: tuple[float, float], times: int) -> tuple[float, float]:
    return total[0] + more[0] * times, total[1] + more[1] * times
