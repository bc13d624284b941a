"""Which group an input belongs to, as a checkpoint says it: GPTQ's `g_idx` and the own format's `group_of`."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError


def read_order(order: Tensor | None, in_features: int, groups: int, name: str) -> Tensor | None:
    """Return `order`, int32 `[in]`, for QuantizedWeight's `group_of`: None where it names runs of equal length.

    `order` may be absent (None) or empty, which means runs too. Raises InvalidArgumentError, naming it `name`, when it
    does not give each input a group that is there.
    """
    if order is None or order.numel() == 0:
        return None
    if order.shape != (in_features,) or int(order.min()) < 0 or int(order.max()) >= groups:
        raise InvalidArgumentError(
            f"{name} has shape {list(order.shape)} and groups {int(order.min())} to {int(order.max())}: it must give "
            f"each of {in_features} inputs one of {groups} groups."
        )
    if in_features % groups == 0:
        runs = torch.arange(in_features, device=order.device) // (in_features // groups)
        if torch.equal(order.long(), runs):
            return None
    return order.to(torch.int32)
