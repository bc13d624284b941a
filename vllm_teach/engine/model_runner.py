"""Computes a plan: one forward pass over all its tokens, then one sampled token for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_teach.backends.dispatch import attend as attend_with
from vllm_teach.engine.sampler import sample
from vllm_teach.engine.scheduler import Plan, StepResult
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.models.attend import Attend, window_size
from vllm_teach.models.decoder import Decoder


class ModelRunner:
    """Holds the model and the KV storage; knows neither queue nor requests' ends.

    The tokens of all scheduled sequences lie behind one another in one flat batch, without padding: a prompt of 500
    tokens and twenty decoding sequences are 520 rows of the same matrix products. Only attention goes sequence by
    sequence, since each reads its own keys.
    """

    def __init__(self, model: Decoder, storage: KVStorage, attention_backend: str) -> None:
        self.model = model
        self.storage = storage
        self._backend = attention_backend

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Return a token or an error for each sequence of `plan`, which is not empty. Writes its K and V.

        After an exception no token was chosen and no sequence changed, but earlier layers may have written their K and
        V: the same plan can be executed again, which writes the same slots.
        """
        device = self.model.device
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        for item in plan.items:
            token_ids += item.sequence.tokens(item.start, item.num_tokens)
            positions += range(item.start, item.context_len)
            slots += range(item.first_slot + item.start, item.first_slot + item.context_len)
            last_rows.append(len(token_ids) - 1)
        attend = self._attend(plan, torch.tensor(slots, device=device))
        hidden = self.model(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), attend)
        # Only a sequence's last token predicts something new: the others need no logits.
        logits = self.model.logits(hidden[torch.tensor(last_rows, device=device)])
        return sample(logits, [item.sequence for item in plan.items])

    def _attend(self, plan: Plan, slots: Tensor) -> Attend:
        """Return the `attend` of this step: stores k and v, then lets each sequence read its own run of the cache."""
        rows, begin = [], 0
        for item in plan.items:
            rows.append((begin, begin + item.num_tokens, item))
            begin += item.num_tokens

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
            self.storage.write(layer, slots, k, v)
            out = torch.empty_like(q)
            for first, end, item in rows:
                keys, values = self.storage.view(layer, item.first_slot, item.context_len)
                out[first:end] = self._attend_one(q[None, first:end], keys[None], values[None], window)[0]
            return out

        return attend

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Attend within one sequence: q `[1, q_len, q_heads, head_dim]`, k and v `[1, kv_len, kv_heads, head_dim]`."""
        return attend_with(q, k, v, backend=self._backend, causal=True, window_size=window_size(window))
