"""Plain attention for a whole batch at once, as a model written in plain PyTorch computes it.

The backend "naive" goes over the sequences one by one. As a baseline it would lose by the interpreter's loop, which is
no property of the formula: whoever writes a batch in PyTorch pads it, and calls each operation once.
"""

from __future__ import annotations

from torch import Tensor, arange

from vllm_teach.attention.reference import naive_attention
from vllm_teach.engine.batch import Batch
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.attend import Attend
from vllm_teach.models.language_model import LanguageModel


class PlainBatchRunner(ModelRunner):
    """A runner for caches in which a sequence's reservation is one block. Clears `storage`.

    Steps in which every sequence has one token are computed padded to the longest; prompts, whose padding would cost
    more than it saves, sequence by sequence.
    """

    def __init__(self, model: LanguageModel, storage: KVStorage) -> None:
        super().__init__(model, storage, "naive")
        # Slots that nobody has written yet are multiplied by probabilities of 0, and must not be NaN.
        storage.keys.zero_()
        storage.values.zero_()

    def _attend(self, batch: Batch) -> _PaddedAttend:  # type: ignore[override]
        return _PaddedAttend(self.storage, super()._attend(batch), batch)


class _PaddedAttend:
    """The `attend` of one step."""

    def __init__(self, storage: KVStorage, by_sequence: Attend, batch: Batch) -> None:
        self._storage, self._by_sequence, self._slots = storage, by_sequence, batch.slots
        lens = batch.layout.kv_lens  # [sequences]
        self._padded = len(batch.token_ids) == len(lens)
        self._blocks = batch.layout.block_table[:, 0].long()  # [sequences]
        self._longest = int(lens.max())
        self._visible = (arange(self._longest, device=lens.device) < lens[:, None])[:, None, None]

    def backend(self, window: int | None) -> str:
        """Return the name of the formula's backend: it serves all layers."""
        return "naive"

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        """See `models.attend.Attend`."""
        if not self._padded or window is not None:
            return self._by_sequence(layer, q, k, v, window=window)
        self._storage.write(layer, self._slots, k, v)
        # q[:, None] [sequences, 1, q_heads, head_dim]; keys and values [sequences, longest, kv_heads, head_dim]
        keys = self._storage.keys[layer][self._blocks, : self._longest]
        values = self._storage.values[layer][self._blocks, : self._longest]
        return naive_attention(q[:, None], keys, values, mask=self._visible)[:, 0]
