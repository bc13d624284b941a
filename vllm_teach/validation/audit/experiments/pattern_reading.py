"""What patterns do to a real model: it reads one text under each of them, and a passage that comes again at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_teach.validation.audit.lab import MODEL, Lab

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_teach.attention.patterns import Pattern
    from vllm_teach.models.attend import Attend
    from vllm_teach.models.decoder import Decoder

_TEXT = "texts/corran_sound.txt"
_BLOCK = 256
# Within the second block: hidden from the end by a window of 512, and by blocks that see their neighbour and the first.
_PASSAGE = (300, 428)
_EXACT = 384  # tokens on which exact attention is compared with exact attention


@dataclass(frozen=True)
class Reading:
    """Losses in nats by pattern: the mean over the running text, and over the passage when it comes again.

    `first` is the passage's loss when it comes first, under full attention, `exact_change` how far the loss under
    memory-efficient attention is from that under PyTorch's, as a share.
    """

    running: dict[str, float]
    again: dict[str, float]
    first: float
    exact_change: float
    setting: str

    def worse(self, name: str) -> float:
        """Return by which share the running text's perplexity is above that under full attention."""
        import math

        return math.exp(self.running[name] - self.running["full"]) - 1


def reading_patterns(tokens: int) -> dict[str, Pattern]:
    """Return the patterns, all causal, for a text of so many tokens."""
    from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow

    blocks = -(-tokens // _BLOCK)
    return {
        "full": Causal(),
        "half of the blocks": BlockSparsePattern.random(blocks, _BLOCK, density=0.5) & Causal(),
        "neighbour and first block": BlockSparsePattern.local_and_global(blocks, _BLOCK, local=2) & Causal(),
        "window": LocalWindow(511),
        "window and sinks": GlobalTokens(4) | LocalWindow(511),
    }


def read_patterns(lab: Lab) -> Reading:
    """Read the story with SmolLM2 in float32 under every pattern; its passage comes again 532 tokens later at least.

    Raises ModelNotFoundError where the model was not fetched.
    """
    import torch

    from vllm_teach import data
    from vllm_teach.models import load_model, resolve_model

    story = lab.tokenizer.encode(data.path(_TEXT).read_text(encoding="utf-8"))
    length = lab.pick(1792, 960)
    start, end = _PASSAGE
    ids = torch.tensor(story[:length] + story[start:end])
    model = load_model(resolve_model(MODEL), torch.float32)
    with torch.inference_mode():
        losses = {name: _losses(model, _under(each), ids) for name, each in reading_patterns(len(ids)).items()}
        plain = float(_losses(model, None, ids[:_EXACT]).mean())
    exact = float(losses["full"][: _EXACT - 1].mean())
    return Reading(
        {name: float(each[: length - 1].mean()) for name, each in losses.items()},
        {name: float(each[length:].mean()) for name, each in losses.items()},
        float(losses["full"][start : end - 1].mean()),
        abs(exact / plain - 1),
        f"{MODEL}, float32, {len(ids):,} tokens of a story it has not seen",
    )


def _losses(model: Decoder, attend: Attend | None, ids: Tensor) -> Tensor:
    """Return -ln p of each token but the first, all read in one go."""
    from vllm_teach.models.scoring import decoder_parts
    from vllm_teach.quantization.sliding_window import perplexity

    hidden, head = decoder_parts(model, attend)
    return perplexity(hidden, ids, window=len(ids), head=head).nlls


def _under(pattern: Pattern) -> Attend:
    """Return an `attend` for one text, by memory-efficient attention under `pattern`."""
    from vllm_teach import backends

    run = backends.get("memory_efficient").run

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return run(q[None], k[None], v[None], pattern=pattern)[0]

    return attend
