"""What attention a model of transformers wants, found by running one token through it.

Configurations name the same thing in many ways, and some name it nowhere. So the model itself is asked: a function
registered as its attention notes what each layer hands it, and one registered as its mask notes which keys a late
query may see.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_teach.errors import ModelLoadError, VllmTeachError
from vllm_teach.models.config import ModelConfig

_PROBE = "vllm_teach_probe"
# What some layers ask their attention for, besides q, k, v and mask, and `attend` does not offer.
_UNSERVED = {
    "softcap": "caps its attention scores (softcap), which our attention over the cache does not do",
    "s_aux": "has attention sinks as weights (s_aux), which our attention over the cache does not do",
    "position_bias": "adds a bias to its attention scores, which our attention over the cache does not do",
}
_OTHER_MODEL = "use another model, or transformers itself"


@dataclass(frozen=True)
class _Layer:
    """One call of the attention function: head counts, head size and what mask came with it."""

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mask: Tensor


def probe(model: PreTrainedModel) -> ModelConfig:
    """Return the shape of `model`, whose attention is left switched to the probe's.

    Raises ModelLoadError, saying why, for a model whose attention `attend` cannot compute: not replaceable, not causal,
    with masks other than one sliding window, with softcap, sinks or biases, with layers of unequal shape, with layers
    that keep a state of another kind, or with rotations that depend on the longest text of the batch.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise refusal(model, f"says max_position_embeddings = {positions}, so how long its texts may be is unknown")
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        for each in kind.values() if isinstance(kind, dict) else [kind]:  # one for each kind of layer, or one
            if each in ("dynamic", "longrope"):
                raise refusal(model, f"turns positions by {each!r}, which depends on the longest text of the batch")
    switch_attention(model, _PROBE)
    layers = _run_one_token(model, positions)
    shapes = {(layer.q_heads, layer.kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1 or [layer.index for layer in layers] != list(range(config.num_hidden_layers)):
        raise refusal(model, "has layers of unequal attention, or some without, and the cache holds equal ones")
    windows = [int(layer.mask) for layer in layers]
    different = {window for window in windows if window}
    if len(different) > 1:
        raise refusal(model, f"has windows of {len(different)} sizes, and one is supported")
    q_heads, kv_heads, head_dim = shapes.pop()
    return ModelConfig(
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_layers=len(layers),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=positions,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        sliding_window=different.pop() if different else None,
        sliding_layers=tuple(window > 0 for window in windows),
    )


def body_of(model: PreTrainedModel) -> Any:
    """Return the part of `model` that makes hidden states. Raises ModelLoadError where that is no part of its own."""
    body = model.get_decoder()
    if body is model:
        raise refusal(model, "has no part that computes hidden states alone")
    return body


def switch_attention(model: PreTrainedModel, name: str) -> None:
    """Make `model` call the attention function registered under `name`. Raises ModelLoadError where it cannot."""
    # transformers only warns, in its log, where a model computes attention by code of its own.
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise refusal(model, "computes attention by code of its own, so it cannot be replaced")


@torch.inference_mode()
def _run_one_token(model: PreTrainedModel, positions: int) -> list[_Layer]:
    """Return what each layer handed its attention, in their order, for one token at position 0."""
    notes = _Notes(model, positions)
    token = _notes.set(notes)
    try:
        zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        body_of(model)(input_ids=zero, position_ids=zero, use_cache=False)
    except VllmTeachError:
        raise
    except Exception as error:  # of code that is not ours and may count on a mask of another form
        raise refusal(model, f"does not run with our attention ({type(error).__name__}: {error})") from error
    finally:
        _notes.reset(token)
    return notes.layers


class _Notes:
    """Stands for attention and mask while the probe runs."""

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        self.model, self.positions = model, positions
        self.layers: list[_Layer] = []

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, wishes: dict[str, Any]) -> Tensor:
        """Note a layer's call; q, k and v are `[1, heads, 1, head_dim]`, and so is the answer, which means nothing."""
        for name, reason in _UNSERVED.items():
            if wishes.get(name) is not None:
                raise refusal(self.model, reason)
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise refusal(self.model, "has keys and values of unequal size, and the cache holds equal ones")
        if not isinstance(mask, Tensor) or mask.ndim:
            raise refusal(self.model, "builds its attention masks itself, so who sees whom is unknown")
        if mask < 0:
            raise refusal(self.model, "has an attention mask that is neither causal nor a sliding window")
        self.layers.append(_Layer(module.layer_idx, q.shape[1], k.shape[1], q.shape[-1], mask))
        return torch.zeros_like(q)

    def mask(self, mask_function: Any) -> Tensor:
        """Return the window that a mask describes, as the number that the layers will be handed for a mask."""
        return torch.tensor(window_of(mask_function, self.positions))


_notes: ContextVar[_Notes] = ContextVar("notes of the probe")


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **wishes: Any
) -> tuple[Tensor, None]:
    return _notes.get().attention(module, query, key, value, attention_mask, wishes).transpose(1, 2), None


def _mask(*, mask_function: Any, **_: object) -> Tensor:
    return _notes.get().mask(mask_function)


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, _mask)


def window_of(sees: Any, positions: int) -> int:
    """Return how many keys a query may see by the rule `sees(batch, head, query, key)`; 0: all before it.

    -1 for another rule, which need not be bad: some models build masks that no layer uses.
    """
    keys, zero = torch.arange(positions), torch.tensor(0)
    window = 0
    for query in (positions - 1, positions - 2, positions // 2):
        visible = torch.as_tensor(sees(zero, zero, torch.tensor(query), keys)).expand(positions)
        width = int(visible.sum())
        window = window or width
        if width != min(window, query + 1) or not width or not visible[query + 1 - width : query + 1].all():
            return -1
    return 0 if window == positions else window


def refusal(model: PreTrainedModel, reason: str) -> ModelLoadError:
    """Return the error for a model that our attention cannot serve."""
    return ModelLoadError(f"{type(model).__name__} {reason}: {_OTHER_MODEL}.")
