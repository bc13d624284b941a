"""The model runner of rank 0: what it computes, it has the other ranks compute with it."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_teach.attention.patterns import Pattern
from vllm_teach.engine.batch import Batch
from vllm_teach.engine.model_runner import ModelRunner
from vllm_teach.engine.plan import Plan, StepResult
from vllm_teach.engine.rank_messages import Forward, Logits, MakeCache
from vllm_teach.engine.ranks import Ranks
from vllm_teach.errors import EngineDeadError, InvalidArgumentError
from vllm_teach.kvcache.storage import KVStorage
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.models.attend import Attend
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.language_model import LanguageModel


class DrivingRunner(ModelRunner):
    """A `ModelRunner` that drives `ranks`; `model` is rank 0's part.

    Each rank has as many blocks as `storage`, with the K and V of its own heads.

    Raises InvalidArgumentError when one has no room for them. After an EngineDeadError nothing is computed any more.
    """

    def __init__(
        self, ranks: Ranks, model: LanguageModel, storage: KVStorage, attention_backend: str, pattern: Pattern | None
    ) -> None:
        super().__init__(model, storage, attention_backend, pattern)
        self.model = _Driven(self.model, ranks)
        self._ranks = ranks
        self._owed: tuple[Transfer, ...] = ()  # took place here and not yet on the others
        cache = MakeCache(storage.num_blocks, storage.num_host_blocks)
        ranks.demand(cache, lambda answer: InvalidArgumentError(f"a KV cache cannot be made ({answer}): use another."))

    def execute(self, plan: Plan) -> StepResult:
        """See `ModelRunner.execute`. Raises EngineDeadError when a rank has died, or does not answer in time."""
        self._ranks.check()
        try:
            result = super().execute(plan)
            if result.errors:
                self._ranks.check_last_pass()
        except EngineDeadError as error:
            raise self._ranks.mourn(error) from error
        return result

    def transfer(self, plan: Plan) -> None:
        """Apply the transfers here; the others hear of those that took place, in front of the next batch."""
        first = plan.num_applied
        try:
            super().transfer(plan)
        finally:
            self._owed += plan.transfers[first : plan.num_applied]

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        self._ranks.tell(Forward.of(self._owed, batch))
        with self._ranks.part.in_step(len(batch.token_ids)):
            self._owed = ()
            return super().forward(batch)


class _Driven:
    """The whole model, to rank 0's eye: `logits` are those of all ranks."""

    def __init__(self, model: LanguageModel, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self._model(token_ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()  # some rows of a batch may lie apart, and what is sent must not
        self._ranks.tell(Logits(len(hidden)))
        return self._model.logits(self._ranks.group.broadcast(hidden))
