"""Any causal language model of transformers as a model of the engine: its layers attend through our `attend`.

transformers lets a model's attention be replaced by a function registered under a name
(`transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS`). Ours hands q, k and v to the engine, so that a model this
package has never heard of runs on the paged cache. Everything else is the model's own code.
"""

from __future__ import annotations

import copy
import math
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.attend import Attend, full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.hugging_face_probe import body_of, probe, refusal, switch_attention
from vllm_teach.models.resolve import resolve_model

_PAGED = "vllm_teach"
# The attention of the forward pass that runs in this thread. Not every model hands unknown arguments to its layers.
_current: ContextVar[tuple[Attend, ModelConfig]] = ContextVar("current attend")


class HuggingFaceModel:
    """A model of transformers with `Decoder`'s surface: `config`, `dtype`, `device`, a call on a flat batch, `logits`.

    Takes `model` over: it is put in eval mode and switched to our attention, so its own `generate` works no more.
    Raises ModelLoadError where our attention cannot compute what the model's does, as `probe` finds out, and where a
    text of a few tokens, computed before and after, shows that it does not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.hf = model.eval().requires_grad_(False)
        text = torch.tensor([1, 3, 2, 4], device=model.device) * (model.config.get_text_config().vocab_size // 5)
        with torch.inference_mode():
            expected = _own_logits(model, text)
        self.config = probe(model)
        switch_attention(model, _PAGED)
        self._body = body_of(model)
        self._head = _without(model, self._body)
        self._check(text, expected)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden state of each token, `[tokens, hidden_size]`, ready for `logits`.

        `token_ids` and `positions` are integer `[tokens]`: a flat batch, which the model takes for one text whose
        positions are given. Only attention mixes its tokens, and that is `attend`'s, which may store k and v.
        """
        token = _current.set((attend, self.config))
        try:
            output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            _current.reset(token)
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the score of each vocabulary entry, `[tokens, vocab_size]`, for `hidden` `[tokens, hidden_size]`.

        Computed by the model's own code, which may scale or cap them.
        """
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.hf.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.hf.device

    def num_parameters(self) -> int:
        """Return how many weights the model has, a tied matrix counted once."""
        return self.hf.num_parameters()

    @torch.inference_mode()
    def _check(self, text: Tensor, expected: Tensor) -> None:
        """Compute `text` twice in one flat batch: neither place in the batch nor our attention may change its logits.

        Finds what no probe asks for: RoBERTa counts positions from its padding id on, BART takes the place in the batch
        for the position.
        """
        one, places = full_causal(), torch.arange(len(text), device=text.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
            halves = zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True)
            return torch.cat([one(layer, *half, window=window) for half in halves])

        found = self.logits(self(text.repeat(2), places.repeat(2), attend)).float()
        # Rounding is far below, and another position or mask far above, either limit.
        limit = 1e-3 if self.dtype is torch.float32 else 0.1
        error = float((found - expected.repeat(2, 1)).norm() / expected.repeat(2, 1).norm())
        if not error < limit:
            reason = f"computes other logits with our attention than with its own (they differ by {error:.0%})"
            raise refusal(self.hf, reason)


def load_hugging_face(
    name_or_path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> HuggingFaceModel:
    """Return the model that `resolve_model` finds under `name_or_path`, loaded by transformers, in `dtype` on `device`.

    Raises what `resolve_model` raises, and ModelLoadError when transformers cannot load it (code that comes with a
    model is not run) or our attention cannot serve it.
    """
    folder = resolve_model(name_or_path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"transformers cannot load the model in {folder} ({reason}): check its files.") from error
    return HuggingFaceModel(model.to(device))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Stand in for a layer's attention: query, key and value are `[1, heads, tokens, head_dim]`.

    Windows come from the config, where `probe` put them; it has refused whatever else a layer may ask for.
    """
    attend, config = _current.get()
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    # `attend` multiplies the scores by 1/sqrt(head_dim), as nearly all models do; another factor goes into q.
    usual = 1 / math.sqrt(config.head_dim)
    if scaling is not None and not math.isclose(scaling, usual):
        q = q * (scaling / usual)
    window = config.window(module.layer_idx)
    # Passed only where there is one, so that an `attend` that knows none fails aloud on such a layer.
    out = attend(module.layer_idx, q, k, v) if window is None else attend(module.layer_idx, q, k, v, window=window)
    return out[None], None


# No mask function is registered under this name, so transformers builds no mask: `attend` knows who sees whom.
ALL_ATTENTION_FUNCTIONS.register(_PAGED, _attention)


def _own_logits(model: Any, text: Tensor) -> Tensor:
    """Return `[tokens, vocab_size]` in float32 as the model computes them with the attention it came with."""
    return model(input_ids=text[None], use_cache=False).logits[0].float()


class _BodyOutput(BaseModelOutputWithPast):
    """Hidden states alone. Of the rest, which differs (cross attentions, router logits), every field is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _given_hidden(*_: Any, inputs_embeds: Tensor, **__: Any) -> _BodyOutput:
    """Stand in for a body's `forward`: return what it is given as if it were the body's output."""
    return _BodyOutput(last_hidden_state=inputs_embeds)


def _without(module: nn.Module, body: nn.Module) -> Any:
    """Return a copy of `module`, its weights shared, whose part `body` only returns what it is given.

    Of a whole model it leaves what comes after the body, which differs: Gemma 2 caps the logits, Cohere and Granite
    scale them, GPT-J has a bias. Its own `forward` does it all.
    """
    changed = copy.copy(module)
    if module is body:
        changed.forward = _given_hidden
    else:
        children = {name: child for name, child in module.named_children() if body in child.modules()}
        changed._modules = {**module._modules, **{name: _without(child, body) for name, child in children.items()}}
    return changed
