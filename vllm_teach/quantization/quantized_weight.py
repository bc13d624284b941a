"""A matrix of small integers, with a scale and a zero for each group of a row: what every method here makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight `[out, in]` in `bits` bits: w[o, i] ≈ scales[o, g] · (codes[o, i] - zeros[o, g]), i of group g.

    `codes` is uint8 `[out, in]` with values 0 … 2^bits - 1; `scales` is float16 `[out, groups]`, positive and finite;
    `zeros`, the codes that stand for 0, is uint8 `[out, groups]`. Groups are runs of in / groups inputs, or what
    `group_of`, int32 `[in]`, says (GPTQ's g_idx, after act-order). One group is a scale per output channel; one scale
    for the whole tensor is the same number in every row.

    Raises InvalidArgumentError for tensors that are empty or do not fit together, and for codes or zeros beyond `bits`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_of: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in BITS:
            raise InvalidArgumentError(f"bits={self.bits!r} is not valid: use one of {', '.join(map(str, BITS))}.")
        matrices = self.codes.dim() == self.scales.dim() == 2 and self.codes.numel()
        if not matrices or len(self.codes) != len(self.scales) or self.zeros.shape != self.scales.shape:
            raise InvalidArgumentError(
                f"codes has shape {list(self.codes.shape)}, scales {list(self.scales.shape)} and zeros "
                f"{list(self.zeros.shape)}: they must be [out, in], [out, groups] and [out, groups], and not empty."
            )
        kinds = self.codes.dtype, self.scales.dtype, self.zeros.dtype
        if kinds != (torch.uint8, torch.float16, torch.uint8):
            raise InvalidArgumentError(
                f"codes, scales and zeros are {', '.join(map(str, kinds))}: they must be uint8, float16 and uint8."
            )
        for name, values in (("codes", self.codes), ("zeros", self.zeros)):
            # Packed, a larger one would spill into its neighbours.
            if self.bits < 8 and values.numel() and int(values.max()) >= 2**self.bits:
                raise InvalidArgumentError(
                    f"{name} holds {int(values.max())}, and {self.bits} bits end at {2**self.bits - 1}: use more bits."
                )
        groups = self.num_groups
        if not groups or (self.group_of is None and self.in_features % groups):
            raise InvalidArgumentError(
                f"scales has {groups} groups for {self.in_features} inputs: give a divisor, or `group_of`."
            )
        order = self.group_of
        if order is not None and (order.shape != (self.in_features,) or order.dtype not in (torch.int32, torch.int64)):
            raise InvalidArgumentError(
                f"group_of has shape {list(order.shape)} and dtype {order.dtype}: give the group of each of "
                f"{self.in_features} inputs as int32."
            )
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < groups:
            raise InvalidArgumentError(
                f"group_of names groups {int(order.min())} to {int(order.max())}: there are 0 to {groups - 1}."
            )

    @property
    def out_features(self) -> int:
        """How many rows the matrix has."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """How many columns the matrix has."""
        return self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        """How many scales a row has."""
        return self.scales.shape[1]

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight on `device`."""
        group_of = None if self.group_of is None else self.group_of.to(device)
        return QuantizedWeight(
            self.codes.to(device), self.scales.to(device), self.zeros.to(device), self.bits, group_of
        )

    def groups(self) -> Tensor:
        """Return the group of each input, int64 `[in]`."""
        if self.group_of is not None:
            return self.group_of.long()
        size = self.in_features // self.num_groups
        return torch.arange(self.in_features, device=self.codes.device) // size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight that the codes stand for, `[out, in]`, computed in float32 and rounded to `dtype`."""
        group = self.groups()
        steps = self.codes.float() - self.zeros.float()[:, group]  # [out, in]
        return (steps * self.scales.float()[:, group]).to(dtype)
