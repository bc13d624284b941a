"""A small and real training loop: bf16 autocast over float32 weights, AdamW, warmup and cosine, clipping, dropout."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.training.attend import window_attend
from vllm_teach.training.batches import batch_at, derive_seed, steps_per_epoch
from vllm_teach.training.checkpoint import check_checkpoint, damage_errors, load_checkpoint, save_checkpoint
from vllm_teach.training.evaluation import stream_loss
from vllm_teach.training.model import initial_model
from vllm_teach.training.optimizer import learning_rate, make_optimizer
from vllm_teach.training.options import TrainingOptions
from vllm_teach.training.residual_dropout import residual_dropout


@dataclass
class History:
    """What a run measured: per step the training loss (nats per token, dropout on) and the gradients' norm.

    `dev_losses` holds (steps done, nats per token) of each evaluation, in windows of its step's length. `seconds` is
    the time of the loop, evaluations included; `cpu_seconds` is the processor's, of all threads together, which counts
    no waiting for other programs.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    dev_losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def best_step(self) -> int:
        """After how many steps the dev loss was lowest; all of them when there was no evaluation."""
        return min(self.dev_losses, key=lambda entry: entry[1])[0] if self.dev_losses else len(self.losses)


@dataclass
class TrainingRun:
    """A finished run: `model` has the weights of `history.best_step`, in float32 and eval mode, without gradients."""

    model: Decoder
    history: History


def train(
    config: ModelConfig,
    tokens: Tensor,
    options: TrainingOptions | None = None,
    *,
    dev_tokens: Tensor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> TrainingRun:
    """Train a new model of shape `config` to predict each next id of the stream `tokens`, int64 `[tokens]`.

    With `dev_tokens`, the weights with the lowest loss there are kept. With `checkpoint`, the run is saved to that file
    every `checkpoint_every` steps, and goes on from it if it is there: with the same losses as without interruption.
    Runs on the CPU, and leaves its default generator as it was.

    Raises InvalidArgumentError when the tokens are too few, the window exceeds the model's context, the checkpoint is
    another run's, or the loss stops being a number; ModelLoadError when the checkpoint is damaged, CacheError when it
    cannot be written.
    """
    options = options or TrainingOptions()
    _check(config, tokens, dev_tokens, options)
    check_count("checkpoint_every", checkpoint_every, 1)
    run = _Run(config, tokens, options, dev_tokens)
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        run.resume(checkpoint)
    with residual_dropout(run.model, options.residual_dropout), _bar(run, progress) as bar:
        while run.step < options.steps:
            started, cpu_started = time.perf_counter(), time.process_time()
            run.advance()
            run.history.seconds += time.perf_counter() - started
            run.history.cpu_seconds += time.process_time() - cpu_started
            bar.update()
            bar.set_postfix_str(f"loss {run.history.losses[-1]:.3f}, dev {run.best_loss:.3f}", refresh=False)
            if checkpoint is not None and (run.step % checkpoint_every == 0 or run.step == options.steps):
                run.save(checkpoint)
    return run.finish()


class _Run:
    """The state of a run after `step` steps."""

    def __init__(self, config: ModelConfig, tokens: Tensor, options: TrainingOptions, dev_tokens: Tensor | None):
        self.config, self.tokens, self.options, self.dev_tokens = config, tokens, options, dev_tokens
        self.model = initial_model(config, options.seed)
        self.optimizer = make_optimizer(self.model, options)
        self.history = History()
        self.best: dict[str, Tensor] = {}
        self.best_loss = math.inf

    @property
    def step(self) -> int:
        return len(self.history.losses)

    def advance(self) -> None:
        """Do one step, and evaluate where one is due. What is random in it depends on (seed, step) alone."""
        options = self.options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(options.seed, "step", self.step))
            loss, norm = self._descend()
        self.history.losses.append(loss)
        self.history.gradient_norms.append(norm)
        if self.dev_tokens is not None and (self.step % options.evaluate_every == 0 or self.step == options.steps):
            window = options.batch_shape(self.step - 1)[1]
            loss = stream_loss(self.model, self.dev_tokens, window=window, dtype=options.dtype)
            self.history.dev_losses.append((self.step, loss))
            if loss < self.best_loss:
                self.best_loss = loss
                self.best = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def _descend(self) -> tuple[float, float]:
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, options)
        batch_size, window = options.batch_shape(self.step)
        inputs, targets = batch_at(self.tokens, self.step, batch_size=batch_size, window=window, seed=options.seed)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = batch_loss(self.model, inputs, targets, options)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise InvalidArgumentError(
                f"learning_rate={options.learning_rate} made the loss {loss.item()} at step {self.step}: lower it."
            )
        self.optimizer.step()
        return loss.item(), norm.item()

    def finish(self) -> TrainingRun:
        if self.best:
            self.model.load_state_dict(self.best)
        return TrainingRun(self.model.eval().requires_grad_(False), self.history)

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        if self.dev_tokens is not None:
            digest.update(self.dev_tokens.numpy().tobytes())
        return {**asdict(self.options), **asdict(self.config), "tokens": digest.hexdigest()}

    def save(self, file: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": asdict(self.history),
            "best": self.best,
            "best_loss": self.best_loss,
        }
        save_checkpoint(file, self._identity(), state)

    def resume(self, file: Path) -> None:
        check_checkpoint(file)
        state = load_checkpoint(file, self._identity())
        if state is None:
            return
        with damage_errors(file):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.history = History(**state["history"])
            self.best, self.best_loss = state["best"], state["best_loss"]


def batch_loss(model: Decoder, inputs: Tensor, targets: Tensor, options: TrainingOptions) -> Tensor:
    """Return the mean of -ln p of `targets` after `inputs`, int64 `[batch_size, window]` each: a float32 scalar."""
    batch_size, window = inputs.shape
    attend = window_attend(batch_size, options.attention, options.attention_dropout if model.training else 0.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
        hidden = model(inputs.flatten(), torch.arange(window).repeat(batch_size), attend)  # [tokens, hidden]
        logits = model.logits(hidden)  # [tokens, vocab]
    return F.cross_entropy(logits.float(), targets.flatten())


def _check(config: ModelConfig, tokens: Tensor, dev_tokens: Tensor | None, options: TrainingOptions) -> None:
    for name, value, wanted in (("config", config, ModelConfig), ("options", options, TrainingOptions)):
        if not isinstance(value, wanted):
            raise InvalidArgumentError(
                f"{name} is of type {type(value).__name__}; it must be of type {wanted.__name__}."
            )
    for name, ids in (("tokens", tokens), ("dev_tokens", dev_tokens)):
        if ids is None:
            continue
        fits = isinstance(ids, Tensor) and ids.dim() == 1 and ids.dtype == torch.int64 and ids.device.type == "cpu"
        if not fits or len(ids) < 2:
            raise InvalidArgumentError(
                f"{name} is no flat int64 tensor of two ids or more on the CPU: see join_documents."
            )
        if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            raise InvalidArgumentError(
                f"{name} holds the ids {int(ids.min())} to {int(ids.max())}: config.vocab_size={config.vocab_size} "
                f"allows 0 to {config.vocab_size - 1}."
            )
    for batch_size, window in {options.batch_shape(0), options.batch_shape(options.steps - 1)}:
        if window > config.max_position:
            raise InvalidArgumentError(
                f"a window of {window} tokens is longer than the model's context: give at most {config.max_position}."
            )
        steps_per_epoch(len(tokens), batch_size, window)


@contextmanager
def _bar(run: _Run, progress: bool) -> Iterator[tqdm]:
    # Saying disable=False would overrule the environment's TQDM_DISABLE.
    quiet: dict[str, Any] = {} if progress else {"disable": True}
    with tqdm(total=run.options.steps, initial=run.step, desc="train", unit="step", **quiet) as bar:
        yield bar
