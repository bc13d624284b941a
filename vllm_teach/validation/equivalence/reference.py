"""transformers' answers: its own greedy continuations, computed once, and its logits after any other tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_teach.engine.logits import gumbel_noise
from vllm_teach.engine.request import Sequence as TokenStream
from vllm_teach.models.cache import cache_home
from vllm_teach.models.weight_files import weight_files
from vllm_teach.performance.environment import installed_version
from vllm_teach.validation.equivalence.workload import Asked

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Continuation:
    """The reference's tokens after a prompt, and for each how far its logit lies above the second best."""

    tokens: list[int]
    gaps: list[float]


class Reference:
    """`transformers`' model from the directory `path`, on the CPU in `dtype`. It is loaded when first needed."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.path, self.dtype = path, dtype

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, in eval mode."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype, local_files_only=True).eval()

    def continuations(
        self, asked: Sequence[Asked], folder: Path | None = None, tell: Callable[[int], object] = lambda count: None
    ) -> list[Continuation]:
        """Return `generate`'s greedy continuation of each request, one at a time, with its own KV cache.

        They are kept in `folder`, by default in the package's cache folder, under a name made of all they depend on:
        weights, requests, dtype and versions. `tell` hears how many are done while they are computed.
        """
        file = (folder or cache_home() / "equivalence") / f"{self._key(asked)}.json"
        if file.is_file():
            return [Continuation(**each) for each in json.loads(file.read_text(encoding="utf-8"))]
        found = []
        for count, request in enumerate(asked):
            tell(count)
            found.append(self._continue(request))
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".partial-{os.getpid()}")
        partial.write_text(json.dumps([vars(each) for each in found]), encoding="utf-8")
        partial.replace(file)
        return found

    @torch.inference_mode()
    def _continue(self, request: Asked) -> Continuation:
        ids = torch.tensor([request.prompt])
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.num_outputs,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.cat(result.logits).topk(2).values  # [num_outputs, 2]
        return Continuation(result.sequences[0, ids.shape[1] :].tolist(), (top[:, 0] - top[:, 1]).tolist())

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int], first: int = 0) -> Tensor:
        """Return the logits from which each of `tokens[first:]` would be chosen, `[len(tokens) - first, vocab]`.

        One pass over the prompt and all tokens but the last: teacher forcing.
        """
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        return self.model(ids, use_cache=False, logits_to_keep=len(tokens) - first).logits[0].float()

    def _key(self, asked: Sequence[Asked]) -> str:
        digest = hashlib.sha256()
        for file in (self.path / "config.json", *weight_files(self.path)):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        wanted = [(request.prompt, request.num_outputs) for request in asked]
        versions = [installed_version(name) for name in ("transformers", "torch")]
        digest.update(json.dumps([wanted, str(self.dtype), versions]).encode())
        return digest.hexdigest()[:32]


def add_noise(logits: Tensor, stream: TokenStream, first: int = 0) -> Tensor:
    """Return what the draws of `stream` maximise from position `first` on: its logits, and its own random numbers.

    By the Gumbel-max trick a draw at temperature t takes the largest of logit / t + noise; here all of it times t, so
    that a gap is one in logits. Greedy streams have no noise.
    """
    if stream.params.greedy:
        return logits
    seeds = (
        replace(stream, output_token_ids=stream.output_token_ids[:position]).random_seed()
        for position in range(first, first + len(logits))
    )
    noise = torch.stack([gumbel_noise(seed, logits.shape[-1]) for seed in seeds])
    return logits + stream.params.temperature * noise
