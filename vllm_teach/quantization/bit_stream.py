"""Small integers without gaps: value i of a row takes bits i·bits … (i + 1)·bits - 1, the lowest first.

All formats here are this stream; they differ in which way it runs through the matrix. Eight values fill `bits` whole
bytes, so packing works on eights of them, whatever the number of bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Return uint8 `[..., ceil(n · bits / 8)]` for `values`, uint8 `[..., n]` below 2^bits; the rest of a row is 0."""
    if bits == 8:
        return _dense(values)
    count = values.shape[-1]
    eights = F.pad(values, (0, -count % 8)).unflatten(-1, (-1, 8)).long()  # [..., ceil(n / 8), 8]
    words = (eights << _steps(8, bits, values)).sum(-1, keepdim=True)  # 8 · bits of each int64
    packed = (words >> _steps(bits, 8, values)) & 255  # [..., ceil(n / 8), bits]
    return packed.to(torch.uint8).flatten(-2)[..., : stream_bytes(count, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` values, uint8 `[..., count]`, of each row of `packed`, uint8 `[..., bytes]`."""
    if bits == 8:
        return _dense(packed[..., :count])
    groups = F.pad(packed, (0, -packed.shape[-1] % bits)).unflatten(-1, (-1, bits)).long()
    words = (groups << _steps(bits, 8, packed)).sum(-1, keepdim=True)
    values = (words >> _steps(8, bits, packed)) & (2**bits - 1)  # [..., ceil(count / 8), 8]
    return values.to(torch.uint8).flatten(-2)[..., :count].contiguous()


def to_words(packed: Tensor) -> Tensor:
    """Return int32 `[..., bytes / 4]` for uint8 `[..., bytes]`: the same bits, four bytes a word, the lowest first."""
    return _dense(packed).view(torch.int32)


def to_bytes(words: Tensor) -> Tensor:
    """Return uint8 `[..., 4 · words]` for int32 `[..., words]`, the inverse of `to_words`."""
    return _dense(words).view(torch.uint8)


def stream_bytes(count: int, bits: int) -> int:
    """Return how many bytes `count` values take."""
    return -(-count * bits // 8)


def _dense(values: Tensor) -> Tensor:
    # Not `contiguous`: that leaves a dimension of length 1 a stride by which no other dtype can be viewed.
    return values.clone(memory_format=torch.contiguous_format)


def _steps(count: int, step: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * step, step, device=like.device)
