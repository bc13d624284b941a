"""A quantised weight in the layout that the CPU kernel reads, and back: `kernels/cpu/matmul/call.h` draws it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError

PANEL_ROWS = 16

# The fields of `Weight` in call.h, in order; all have 64 bits.
WEIGHT_FIELDS = ("panels", "columns", "bits", "in", "out", "group")
_WEIGHT = struct.Struct(f"{len(WEIGHT_FIELDS)}q")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight `[out_features, in_features]` in the kernel's layout (`kernels/cpu/matmul/call.h`); made by `pack`.

    `panels` is uint8 `[panels, bytes]`: PANEL_ROWS rows each, with their codes, float16 scales and 8-bit zeros. `bits`
    are the codes' own; 2 and 3 take the room of 4. `columns`, int32 `[in_features]` or None, says which column of x
    each input of the packed order is. The tensors must stay where they are: the kernel knows their addresses.
    """

    panels: Tensor
    columns: Tensor | None
    bits: int
    in_features: int
    out_features: int
    group_size: int

    @property
    def num_bytes(self) -> int:
        """The memory that the weight takes, in bytes."""
        return sum(tensor.nbytes for tensor in (self.panels, self.columns) if tensor is not None)

    @property
    def num_groups(self) -> int:
        """How many scales a row has."""
        return self.in_features // self.group_size

    @cached_property
    def stored_bits(self) -> int:
        """How many bits a code takes: 4 or 8."""
        return max(4, self.bits)

    @cached_property
    def structure(self) -> bytes:
        """The weight as the kernel wants it: `Weight` of call.h."""
        columns = 0 if self.columns is None else self.columns.data_ptr()
        sizes = (self.stored_bits, self.in_features, self.out_features, self.group_size)
        return _WEIGHT.pack(self.panels.data_ptr(), columns, *sizes)

    def __reduce__(self) -> tuple[type[PackedWeight], tuple[object, ...]]:
        # A copy has its tensors elsewhere, and must not take the structure along.
        return PackedWeight, tuple(getattr(self, field.name) for field in fields(self))

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the words of codes, int32, the scales and the zeros, each `[panels, words or groups, PANEL_ROWS]`.

        They are views into `panels`.
        """
        words, groups = self.in_features * self.stored_bits // 32, self.num_groups
        sizes = [words * PANEL_ROWS * 4, groups * PANEL_ROWS * 2, groups * PANEL_ROWS]
        codes, scales, zeros, _ = self.panels.split([*sizes, self.panels.shape[1] - sum(sizes)], dim=1)
        return (
            codes.view(torch.int32).unflatten(1, (words, PANEL_ROWS)),
            scales.view(torch.float16).unflatten(1, (groups, PANEL_ROWS)),
            zeros.unflatten(1, (groups, PANEL_ROWS)),
        )


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_of: Tensor | None = None) -> PackedWeight:
    """Return the weight w[o, i] = scales[o, g] · (codes[o, i] - zeros[o, g]) in the kernel's layout; see `unpack`.

    `codes` is uint8 `[out, in]` below 2^bits, `scales` float16 and `zeros` uint8 `[out, groups]`, `bits` 2, 3, 4 or 8.
    Groups are runs of in / groups inputs, a multiple of 8, or what `group_of`, int32 `[in]`, says: as many inputs for
    each. To multiply several weights with one input in one call, put their rows behind one another.

    Raises InvalidArgumentError for what does not fit together.
    """
    _check_weight(codes, scales, zeros, bits)
    out, groups = scales.shape
    columns = None if group_of is None else _sorted_columns(group_of, codes.shape[1], groups)
    if columns is not None:
        codes = codes[:, columns]
    packed_bits = max(4, bits)
    inputs = 32 // packed_bits  # of a word
    padding = -out % PANEL_ROWS
    # Padding rows are zero: their codes and zeros are both 0, as are their scales.
    codes, scales, zeros = (F.pad(tensor.contiguous(), (0, 0, 0, padding)) for tensor in (codes, scales, zeros))
    by_word = codes.view(-1, PANEL_ROWS, codes.shape[1] // inputs, inputs).transpose(1, 2)
    words = torch.zeros(by_word.shape[:3], dtype=torch.int32)
    for i in range(inputs):
        words |= (by_word[..., i].int() ^ 1 << packed_bits - 1) << _first_bit(i, packed_bits)
    parts = [words, *(tensor.view(-1, PANEL_ROWS, groups).transpose(1, 2).contiguous() for tensor in (scales, zeros))]
    panels = torch.cat([part.flatten(1).view(torch.uint8) for part in parts], dim=1)
    panels = F.pad(panels, (0, -panels.shape[1] % 64))
    order = None if columns is None else columns.int()
    return PackedWeight(panels, order, bits, codes.shape[1], out, codes.shape[1] // groups)


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor, int, Tensor | None]:
    """Return (codes, scales, zeros, bits, group_of), exactly what `pack` was given.

    But for a `group_of` that names runs in order, which comes back as None.
    """
    words, scales, zeros = (view.transpose(1, 2).flatten(0, 1) for view in packed.views())
    out = packed.out_features
    codes, group_of = _codes(words[:out], packed), None
    if packed.columns is not None:
        columns = packed.columns.long()
        group_of = torch.empty_like(packed.columns)
        group_of[columns] = torch.arange(packed.in_features, dtype=torch.int32) // packed.group_size
        codes = torch.empty_like(codes).index_copy_(1, columns, codes)
    return codes, scales[:out].contiguous(), zeros[:out].contiguous(), packed.bits, group_of


def rows(packed: PackedWeight, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the dequantised rows of `ids`, integers `[n]`: `[n, in_features]`, computed in float32.

    Raises InvalidArgumentError for an id that no row has, and for ids that are no row of integers on the weight's
    device.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or ids.device != packed.panels.device:
        raise InvalidArgumentError(
            f"ids has shape {list(ids.shape)} and dtype {ids.dtype} on {ids.device}: give int32 or int64 [n] on "
            f"{packed.panels.device}."
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < packed.out_features:
        raise InvalidArgumentError(
            f"ids has values from {int(ids.min())} to {int(ids.max())}: the matrix has rows 0 to "
            f"{packed.out_features - 1}."
        )
    panel, row = ids // PANEL_ROWS, ids % PANEL_ROWS
    words, scales, zeros = (view[panel, :, row] for view in packed.views())
    return dequantize_rows(words, scales, zeros, packed).to(dtype)


def dequantize_rows(words: Tensor, scales: Tensor, zeros: Tensor, packed: PackedWeight) -> Tensor:
    """Return rows in float32, `[n, in]`, given their words, int32 `[n, words]`, and scales and zeros, `[n, groups]`."""
    steps = _codes(words, packed).unflatten(1, (packed.num_groups, packed.group_size)).float()
    weight = ((steps - zeros.unsqueeze(-1).float()) * scales.unsqueeze(-1).float()).flatten(1)
    if packed.columns is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, packed.columns.long(), weight)


def _codes(words: Tensor, packed: PackedWeight) -> Tensor:
    """Return the codes of words int32 `[n, in / inputs]`, uint8 `[n, in]` in the packed order of inputs."""
    bits = packed.stored_bits
    fields = [(words >> _first_bit(i, bits) & (1 << bits) - 1) ^ 1 << bits - 1 for i in range(32 // bits)]
    return torch.stack(fields, dim=-1).flatten(1).to(torch.uint8)


def _first_bit(i: int, bits: int) -> int:
    """Return where in a word the code of its input `i` starts: the odd inputs fill the upper half."""
    return i % 2 * 16 + i // 2 * bits


def _sorted_columns(group_of: Tensor, size: int, groups: int) -> Tensor | None:
    """Return the columns in the order of their groups, int64 `[in]`, or None when they already lie so."""
    if group_of.shape != (size,) or group_of.dtype not in (torch.int32, torch.int64) or group_of.device.type != "cpu":
        raise InvalidArgumentError(
            f"group_of has shape {list(group_of.shape)} and dtype {group_of.dtype} on {group_of.device}: give the "
            f"group of each of {size} inputs as int32 on the CPU."
        )
    columns = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[columns].long(), torch.arange(size) // (size // groups)):
        raise InvalidArgumentError(f"group_of must name each of {groups} groups for {size // groups} inputs.")
    return None if torch.equal(columns, torch.arange(size)) else columns


def _check_weight(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> None:
    if not isinstance(bits, int) or bits not in (2, 3, 4, 8):
        raise InvalidArgumentError(f"bits={bits!r} is not valid: use 2, 3, 4 or 8.")
    if (codes.dtype, scales.dtype, zeros.dtype) != (torch.uint8, torch.float16, torch.uint8):
        raise InvalidArgumentError(
            f"codes, scales and zeros are {codes.dtype}, {scales.dtype} and {zeros.dtype}: use uint8, float16 and "
            "uint8."
        )
    for name, tensor in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise InvalidArgumentError(f"{name} has layout {tensor.layout} on {tensor.device}: give dense CPU tensors.")
    if codes.dim() != 2 or scales.dim() != 2 or len(codes) != len(scales) or zeros.shape != scales.shape:
        raise InvalidArgumentError(
            f"codes has shape {list(codes.shape)}, scales {list(scales.shape)} and zeros {list(zeros.shape)}: they "
            "must be [out, in], [out, groups] and [out, groups]."
        )
    size, groups = codes.shape[1], scales.shape[1]
    if not codes.numel() or not groups or size % (8 * groups):
        raise InvalidArgumentError(
            f"codes has shape {list(codes.shape)} and scales {groups} groups: each group must have the same number of "
            "inputs, a multiple of 8."
        )
    for name, tensor in (("codes", codes), ("zeros", zeros)):
        if (most := int(tensor.max())) >= 1 << bits:
            raise InvalidArgumentError(f"{name} has a value of {most}: the most for {bits} bits is {(1 << bits) - 1}.")
