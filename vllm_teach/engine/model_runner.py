"""Computes a plan: one forward pass over all its tokens, then the new tokens of the sequences that are up to date."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_teach.attention.patterns import Pattern
from vllm_teach.backends.dispatch import AUTO, Prepared
from vllm_teach.backends.packed import reads_packed
from vllm_teach.engine.attention_meter import AttentionMeter
from vllm_teach.engine.batch import Batch
from vllm_teach.engine.broken_rows import fail_broken_rows
from vllm_teach.engine.heap import keep_large_blocks
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.engine.prompt_logprobs import rank_prompt_tokens
from vllm_teach.engine.sampler import sample
from vllm_teach.kvcache.quantized_storage import DequantizedBlocks, QuantizedKVStorage
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.attend import window_size
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.language_model import LanguageModel


class ModelRunner:
    """Holds the model and the KV storage; knows neither queue nor requests' ends.

    The tokens of all scheduled sequences lie behind one another in one flat batch, without padding: a chunk of 500
    prompt tokens and twenty decoding sequences are 520 rows of the same matrix products, and one attention call in each
    layer, which reads the cache through the block tables. `attention_backend` computes it; "auto" chooses in each step.
    `pattern`, if given, hides keys from every layer's queries, beside what causality and the layer's own window hide.
    `meter` says what part of the time attention takes. On a processor the whole process keeps memory that was freed.
    """

    def __init__(
        self, model: LanguageModel, storage: KVStorage, attention_backend: str = AUTO, pattern: Pattern | None = None
    ) -> None:
        if model.device.type == "cpu":
            keep_large_blocks()
        self.model = model.join_weights() if isinstance(model, Decoder) else model
        self.storage = storage
        self.pattern = pattern
        self.meter = AttentionMeter(model.device)
        self._backend = attention_backend
        self._codes: QuantizedKVStorage | None = None  # the storage, where attention cannot read it as it lies
        if isinstance(storage, QuantizedKVStorage) and not reads_packed(attention_backend, model.dtype, model.device):
            self._codes = storage

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Apply the transfers of `plan`, write the K and V of its tokens, and return what it samples.

        The plan may consist of transfers alone. After an exception no token was chosen and no sequence changed, but
        earlier layers may have written their K and V: the same plan can be executed again, which writes the same slots.
        Its transfers are not applied a second time.
        """
        self.transfer(plan)
        if not plan.items:
            return StepResult()
        batch = Batch.of(plan, self.storage.block_size, self.storage.zero_block, self.model.device)
        hidden = self.forward(batch)
        result = self._sample(batch, hidden)
        rank_prompt_tokens(self.model, hidden, plan, result)
        fail_broken_rows(hidden, plan, result)
        return result

    def transfer(self, plan: Plan) -> None:
        """Apply the transfers of `plan` that are overdue, and count them in it."""
        for transfer in plan.transfers[plan.num_applied :]:
            self.storage.apply((transfer,))
            plan.num_applied += 1

    def forward(self, batch: Batch) -> Tensor:
        """Write the K and V of the tokens of `batch` and return their last hidden states, `[tokens, hidden_size]`."""
        with self.meter.watch(self._attend(batch)) as attend:
            return self.model(batch.token_ids, batch.positions, attend)

    def _sample(self, batch: Batch, hidden: Tensor) -> StepResult:
        if not batch.sequences:
            return StepResult()
        logits = self.model.logits(hidden if batch.sampled_rows is None else hidden[batch.sampled_rows])
        return sample(logits if batch.sources is None else logits[batch.sources], batch.sequences)

    def _attend(self, batch: Batch) -> _PagedAttend:
        if self._codes is not None:
            blocks = DequantizedBlocks(self._codes, batch.layout.block_table)
            batch = replace(batch, layout=replace(batch.layout, block_table=blocks.block_table))
            return _PagedAttend(blocks, batch, self._backend, self.pattern)
        return _PagedAttend(self.storage, batch, self._backend, self.pattern)


class _PagedAttend:
    """The `attend` of one step: stores k and v, then lets each sequence read its own blocks.

    What depends on lengths, block tables and masks is prepared in the first layer of each kind, with and without a
    window, and serves the others (FlashInfer's plan and run, arXiv 2501.01005).
    """

    def __init__(
        self, storage: KVStorage | DequantizedBlocks, batch: Batch, backend: str, pattern: Pattern | None
    ) -> None:
        self._storage, self._batch, self._backend, self._pattern = storage, batch, backend, pattern
        self._prepared: dict[int | None, Prepared] = {}

    def backend(self, window: int | None) -> str:
        """Return the name of what serves the layers with this `window`, once one of them was computed."""
        return self._prepared[window].backend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        """See `models.attend.Attend`."""
        self._storage.write(layer, self._batch.slots, k, v)
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        prepared = self._prepared.get(window)
        if prepared is None:
            prepared = self._prepared[window] = Prepared(
                q,
                keys,
                values,
                backend=self._backend,
                layout=self._batch.layout,
                causal=True,
                window_size=window_size(window),
                pattern=self._pattern,
            )
        return prepared(q, keys, values)
