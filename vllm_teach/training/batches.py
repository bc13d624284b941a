"""Windows of tokens to train on: which ones step n gets is a function of (seed, n) alone.

So a training that was interrupted goes on at step n without having replayed the n steps before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from vllm_teach.errors import InvalidArgumentError


def join_documents(documents: Iterable[Sequence[int]], end_id: int = 0) -> torch.Tensor:
    """Return one stream of token ids, int64 `[tokens]`: an end of text, then each document and its end of text."""
    ids = [end_id]
    for document in documents:
        ids.extend([*document, end_id])
    return torch.tensor(ids)


def steps_per_epoch(num_tokens: int, batch_size: int, window: int) -> int:
    """Return in how many steps each token of a stream is trained on once, but for less than a batch at its ends.

    Raises InvalidArgumentError when the stream is too short for one batch.
    """
    # A window begins up to `window` - 1 tokens into the stream, and its last target lies one token behind it.
    steps = (num_tokens - window) // window // batch_size
    if steps < 1:
        raise InvalidArgumentError(
            f"tokens has {num_tokens} ids, too few for batch_size={batch_size} windows of {window}: give "
            f"{(batch_size + 1) * window} or more."
        )
    return steps


def batch_at(
    tokens: torch.Tensor, step: int, *, batch_size: int, window: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of `step`, int64 `[batch_size, window]` each; a target is the token after its input.

    In each epoch the stream is cut into windows at another offset, and the windows come in another order.
    """
    steps = steps_per_epoch(len(tokens), batch_size, window)
    epoch, step_of_epoch = divmod(step, steps)
    generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
    offset = int(torch.randint(window, (), generator=generator))
    order = torch.randperm(steps * batch_size, generator=generator)
    chosen = order[step_of_epoch * batch_size :][:batch_size]
    places = offset + chosen[:, None] * window + torch.arange(window)  # [batch_size, window]
    return tokens[places], tokens[places + 1]


def derive_seed(seed: int, purpose: str, number: int) -> int:
    """Return a seed in [0, 2⁶³) for the `number`-th use of randomness for `purpose`, unrelated to its neighbours."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
