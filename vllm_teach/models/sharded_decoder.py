"""One rank's part of a decoder. The ranks run it together; after each sum, all of them have the same hidden states."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_teach.models.attend import Attend
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.layers import MLP, Attention, DecoderLayer, Embedding, Linear
from vllm_teach.models.shard import Shard
from vllm_teach.parallel.group import Group


class ShardedDecoder(Decoder):
    """A `Decoder` whose matrices are those of `shard`; `config` is the shard's, with the whole vocabulary.

    `forward`, `in_step`, and `logits` are called by all ranks of `group` with the same arguments. A rank on which
    `logits` fails has NaN for its part of them.
    """

    def __init__(self, shard: Shard, group: Group) -> None:
        local, rows = shard.config, len(shard.vocabulary)
        super().__init__(local)
        self.shard, self.group = shard, group
        with torch.device("meta"):
            self.model.embed_tokens = Embedding(rows, local.hidden_size)
            self.model.layers = nn.ModuleList(_Layer(local, layer, group) for layer in range(local.num_layers))
            if not local.tie_word_embeddings:
                self.lm_head = Linear(local.hidden_size, rows, bias=False)

    @property
    def num_all_reduces(self) -> int:
        """How many sums a forward pass makes, each of `[tokens, hidden_size]`: the embedding's, and two a layer."""
        return 1 + 2 * self.config.num_layers

    def in_step(self, num_tokens: int) -> AbstractContextManager[None]:
        """Return the block in which a rank prepares and calls `forward`, for so many tokens.

        Where it fails, whatever in it, the others' hidden states become NaN, and nobody waits for this rank.
        """
        shape = (num_tokens, self.config.hidden_size)
        return self.group.all_reduces(
            self.num_all_reduces, lambda: torch.empty(shape, dtype=self.dtype, device=self.device)
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of `token_ids`: each comes from the rank that has it, and is 0 on the others."""
        ids = token_ids - self.shard.vocabulary.start
        elsewhere = (ids < 0) | (ids >= len(self.shard.vocabulary))
        x = self.model.embed_tokens(ids.masked_fill(elsewhere, 0))
        return self.group.all_reduce(x.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return, on rank 0, the score of each vocabulary entry; on the others those of their part of it."""
        counts = [len(ids) for ids in self.shard.vocabularies]
        own: Tensor | None = None
        try:
            own = super().logits(hidden)
        finally:  # the others wait for it
            part = hidden.new_full((len(hidden), counts[self.shard.rank]), torch.nan) if own is None else own
            # The first rank has the most; a gather wants equal shapes.
            parts = self.group.gather(
                part if part.shape[1] == counts[0] else F.pad(part, (0, counts[0] - part.shape[1]))
            )
        if parts is None:
            return part
        return torch.cat([each[:, :count] for each, count in zip(parts, counts, strict=True)], dim=1)


class _Attention(Attention):
    """Some heads: what `o_proj` makes of them is a summand."""

    def __init__(self, config: ModelConfig, layer: int, group: Group) -> None:
        super().__init__(config, layer)
        self.group = group

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """See `Attention.forward`."""
        return self.group.all_reduce(super().forward(x, cos, sin, attend))


class _MLP(MLP):
    """Some of the inner size: what `down_proj` makes of it is a summand."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__(config)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """See `MLP.forward`."""
        return self.group.all_reduce(super().forward(x))


class _Layer(DecoderLayer):
    def __init__(self, config: ModelConfig, layer: int, group: Group) -> None:
        super().__init__(config, layer)
        self.self_attn = _Attention(config, layer, group)
        self.mlp = _MLP(config, group)
