"""AdamW with weight decay on matrices only, and the learning rate of each step."""

from __future__ import annotations

import math

import torch

from vllm_teach.training.options import TrainingOptions


def make_optimizer(model: torch.nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over all weights of `model`.

    The weights of norms scale whole channels, and decaying them would only shrink the output; so they decay not at all.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, fused=True)


def learning_rate(step: int, options: TrainingOptions) -> float:
    """Return the learning rate of `step` (from 0): a linear rise, then half a cosine down to the final fraction."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    falling = 0.5 * (1 + math.cos(math.pi * progress))  # 1 at the end of the rise, 0 after the last step
    return options.learning_rate * (options.final_fraction + (1 - options.final_fraction) * falling)
