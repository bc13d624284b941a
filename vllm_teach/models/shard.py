"""Which part of a decoder's weights one rank has: Megatron-LM's cut (Shoeybi et al. 2019, section 3).

    q, k, v, gate, up    rows (outputs): a rank has whole KV heads with the query heads that read them, and some of the
                         MLP's inner size; what goes in is the whole hidden state
    o, down              columns (inputs): they read what this rank's rows gave, and make a summand of the hidden state
    embedding, output    rows: some of the vocabulary (section 3's last part)
    norms                everything, on every rank

The shares are as even as whole KV heads allow, and no rank has more of anything than one before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.parallel.split import split

_ALL = slice(None)
_VOCABULARY = ("embed_tokens", "lm_head")
_SUMMANDS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Shard:
    """The part of `rank` among `size` ranks of the model that `whole` describes; ranges count from 0.

    `kv_heads` are its KV heads, `inner` its part of the MLP's inner size; `vocabularies` are every rank's token ids.
    """

    whole: ModelConfig
    rank: int
    size: int
    kv_heads: range
    inner: range
    vocabularies: tuple[range, ...]

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int, unit: int = 1) -> Shard:
        """Return the part of `rank`. The MLP is cut at multiples of `unit`, as a quantised one can be.

        Raises InvalidArgumentError when there are fewer KV heads, or units, than ranks.
        """
        most = min(config.num_kv_heads, -(-config.intermediate_size // unit), config.vocab_size)
        if size > most:
            raise InvalidArgumentError(
                f"tensor_parallel_size={size} does not fit this model: its {config.num_kv_heads} KV heads and "
                f"{config.intermediate_size} inner units, cut at multiples of {unit}, can be split over at most {most} "
                f"ranks, so use 1{f' to {most}' if most > 1 else ''}."
            )
        return cls(
            whole=config,
            rank=rank,
            size=size,
            kv_heads=split(config.num_kv_heads, size)[rank],
            inner=split(config.intermediate_size, size, unit)[rank],
            vocabularies=tuple(split(config.vocab_size, size)),
        )

    @property
    def vocabulary(self) -> range:
        """The token ids whose rows this rank has."""
        return self.vocabularies[self.rank]

    @property
    def config(self) -> ModelConfig:
        """The shape of this rank's layers, and so of its KV cache, but for the vocabulary, which is the whole one."""
        queries = self.whole.num_q_heads // self.whole.num_kv_heads  # of one KV head
        return replace(
            self.whole,
            num_q_heads=len(self.kv_heads) * queries,
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )

    def cut(self, module: str) -> tuple[slice, slice]:
        """Return the rows and columns that this rank has of the matrix of `module`, as "model.layers.0.mlp.up_proj".

        A bias has the rows.
        """
        name, whole = module.rpartition(".")[-1], self.whole
        queries = whole.num_q_heads // whole.num_kv_heads
        match name:
            case "q_proj":
                return _times(self.kv_heads, queries * whole.head_dim), _ALL
            case "k_proj" | "v_proj":
                return _times(self.kv_heads, whole.head_dim), _ALL
            case "o_proj":
                return _ALL, _times(self.kv_heads, queries * whole.head_dim)
            case "gate_proj" | "up_proj":
                return _times(self.inner), _ALL
            case "down_proj":
                return _ALL, _times(self.inner)
            case _ if name in _VOCABULARY:
                return _times(self.vocabulary), _ALL
            case _:
                return _ALL, _ALL

    def adds(self, tensor: str) -> bool:
        """Whether this rank has the numbers of `tensor`: the bias of a sum is added once, by rank 0."""
        module, _, kind = tensor.rpartition(".")
        return self.rank == 0 or kind != "bias" or module.rpartition(".")[-1] not in _SUMMANDS


def _times(part: range, size: int = 1) -> slice:
    return slice(part.start * size, part.stop * size)
