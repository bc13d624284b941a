"""Other systems that serve the same requests, for comparison: each says whether it is here and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_teach.errors import EngineError, InvalidArgumentError, ModelLoadError
from vllm_teach.performance.environment import installed_version
from vllm_teach.performance.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORDERS = ("arrival", "prompt length", "output length")
BATCH_SIZES = (16, 32, 64, 8, 4, 1)  # likely ones first: what is tried later is stopped when it is slower


class Peer(Protocol):
    """A system that serves a `Workload` with the same weights, dtype and threads as ours."""

    name: str

    def available(self) -> str | None:
        """Return None if it can run here, else the reason why not, as a sentence."""

    def run(self, workload: Workload) -> float:
        """Serve all requests to their last token and return the seconds it took, its loading left out."""

    def close(self) -> None:
        """Let go of all that it holds. Can be called twice."""


@dataclass(frozen=True)
class StaticBatches:
    """How requests are cut into batches that start and end together: how many at most, and in which order.

    "arrival" leaves them as they come. Sorted by "prompt length" a batch has little padding; sorted by "output length"
    its members end at about the same time, which only an oracle could arrange: output lengths are not known beforehand.
    """

    size: int
    order: str = "arrival"

    def cut(self, workload: Workload) -> list[list[int]]:
        """Return the indices of each batch's requests; sorted ones begin with the longest."""
        if self.order not in ORDERS or self.size < 1:
            raise InvalidArgumentError(
                f"size={self.size}, order={self.order!r} cut no batches: give a size from 1 and one of {ORDERS}."
            )
        indices = list(range(len(workload)))
        if self.order == "prompt length":
            indices.sort(key=lambda i: -len(workload.prompts[i]))
        elif self.order == "output length":
            indices.sort(key=lambda i: (-workload.output_lens[i], -len(workload.prompts[i])))
        return [indices[i : i + self.size] for i in range(0, len(indices), self.size)]

    def __str__(self) -> str:
        """Return it in words."""
        return f"batches of {self.size}, by {self.order}"


@dataclass(frozen=True)
class Trial:
    """One way to batch: its seconds, or those after which it was stopped because another one was faster."""

    batches: StaticBatches
    seconds: float
    stopped: bool


class TransformersPeer:
    """`transformers.generate`, batch by batch: prompts padded on the left, each batch until its longest output.

    A batch computes all its rows until then; only what each request asked for is useful. Greedy, SDPA attention, the
    dynamic cache: generate's own defaults. `model_path` is a folder as `resolve_model` returns it. `run` uses
    `batches`: the fastest ones after `tune`.
    """

    name = "transformers"

    def __init__(self, model_path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.path, self.dtype, self.device = Path(model_path), dtype, device
        self.batches = StaticBatches(16)
        self._model: PreTrainedModel | None = None

    def available(self) -> str | None:
        """Return None; or that transformers is not installed."""
        return None if installed_version("transformers") else "It is not installed: pip install transformers."

    def run(self, workload: Workload) -> float:
        """See `Peer`."""
        return self.run_in(self.batches, workload)

    def run_in(self, batches: StaticBatches, workload: Workload) -> float:
        """Serve all requests in these batches and return the seconds."""
        trial = self._run(workload, batches, inf)
        if trial.stopped:
            raise EngineError(f"{self.name} ended a batch before its last token: its seconds say nothing.")
        return trial.seconds

    def tune(
        self, workload: Workload, sizes: tuple[int, ...] = BATCH_SIZES, orders: tuple[str, ...] = ORDERS
    ) -> Iterator[Trial]:
        """Try batch sizes sorted by output length, which favours static batches most, then the best in other orders.

        Yields a trial of each, and leaves `batches` at the fastest. A size is stopped when it has taken longer than the
        best before it; all orders of the best size run to their end.
        """
        best: Trial | None = None
        for size in dict.fromkeys(min(size, len(workload)) for size in sizes):
            trial = self._run(workload, StaticBatches(size, orders[-1]), best.seconds if best else inf)
            best = trial if best is None or trial.seconds < best.seconds else best
            yield trial
        assert best is not None
        for order in orders[:-1]:
            trial = self._run(workload, StaticBatches(best.batches.size, order), inf)
            best = min(best, trial, key=lambda each: each.seconds)
            yield trial
        self.batches = best.batches

    def close(self) -> None:
        """See `Peer`."""
        self._model = None

    def load(self) -> PreTrainedModel:
        """Return the model; the first call loads it.

        Raises ModelLoadError for a model that transformers cannot load, or only with weights that are not its own, as
        it does, with a warning, where it does not know how the file's are quantised.
        """
        if self._model is None:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            shows_bars = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                model, found = AutoModelForCausalLM.from_pretrained(
                    self.path, dtype=self.dtype, local_files_only=True, output_loading_info=True
                )
            except (ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
                words = str(error).strip().partition("\n")[0].rstrip(" .")
                raise ModelLoadError(
                    f"transformers cannot load {self.path} ({words}): compare without it, or use another model."
                ) from error
            finally:
                if shows_bars:
                    logging.enable_progress_bar()
            if missing := sorted(found["missing_keys"]):
                raise ModelLoadError(
                    f"transformers does not find the weights {', '.join(missing[:3])} in {self.path}: compare without "
                    "it, or use another model."
                )
            self._model = model.to(self.device).eval()
            self._model.generation_config.eos_token_id = None  # every batch runs to the length that was asked for
            self._model.generation_config.pad_token_id = 0
        return self._model

    def _run(self, workload: Workload, batches: StaticBatches, limit: float) -> Trial:
        """Serve the batches until all are served or `limit` seconds are over."""
        model = self.load()
        start = time.perf_counter()
        for indices in batches.cut(workload):
            left = limit - (time.perf_counter() - start)
            if left <= 0 or not self._generate(model, workload.part(indices), left):
                return Trial(batches, time.perf_counter() - start, stopped=True)
        return Trial(batches, time.perf_counter() - start, stopped=False)

    def _generate(self, model: PreTrainedModel, batch: Workload, limit: float) -> bool:
        """Serve one batch; return whether all its tokens came within `limit` seconds."""
        width, new = max(map(len, batch.prompts)), max(batch.output_lens)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        timed: dict[str, Any] = {} if limit == inf else {"max_time": limit}
        with torch.inference_mode():
            out = model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=new,
                do_sample=False,
                **timed,
            )
        return int(out.shape[1]) == width + new
