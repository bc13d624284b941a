"""AutoGPTQ's layout of a weight, version 1 and 2: 2, 3, 4 or 8 bits, a bit stream down the inputs of each channel.

`qweight` is int32 `[in · bits / 32, out]`: each column is the stream of one output channel's codes (3-bit codes cross
word borders, 32 of them fill three words). `qzeros` is int32 `[groups, out · bits / 32]`, a stream along the channels;
`scales` float16 `[groups, out]`; `g_idx` int32 `[in]` the group of each input.

Version 1 stores each zero less one. A zero of 0 would be -1, whose bits spill into its neighbours, so it has no place
there: grids are chosen without it (`min_zero`), or version 2, which stores zeros as they are, is written. What is read
is masked to the bits, as the loaders do: a stored 2^bits - 1 is a zero of 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.bit_stream import pack_bits, to_bytes, to_words, unpack_bits
from vllm_teach.quantization.group_order import read_order
from vllm_teach.quantization.quantized_weight import QuantizedWeight

# 32 codes fill whole words whatever the bits; published loaders ask for it of both sides.
MULTIPLE = 32
TENSORS = ("qweight", "qzeros", "scales")


def check_gptq_shape(out_features: int, in_features: int, name: str = "weight") -> None:
    """Raise InvalidArgumentError when a side of the matrix that `name` names does not fill whole words."""
    if out_features % MULTIPLE or in_features % MULTIPLE:
        raise InvalidArgumentError(
            f"{name} has the shape {[out_features, in_features]}, and a GPTQ checkpoint holds multiples of {MULTIPLE} "
            "on both sides: keep this model in the package's own format (head_bits=8, or the method 'rtn')."
        )


def pack_gptq(weight: QuantizedWeight, version: int = 1) -> dict[str, Tensor]:
    """Return `qweight`, `qzeros`, `scales` and `g_idx` of `weight`.

    Raises InvalidArgumentError when a side is no multiple of 32, and for a zero of 0 in version 1.
    """
    check_gptq_shape(weight.out_features, weight.in_features)
    if version == 1 and bool((weight.zeros == 0).any()):
        raise InvalidArgumentError(
            "zeros holds 0, which GPTQ's version 1 cannot store: quantise with min_zero=1, or use version=2."
        )
    stored = weight.zeros.T - int(version == 1)
    return {
        "qweight": to_words(pack_bits(weight.codes, weight.bits)).T.contiguous(),
        "qzeros": to_words(pack_bits(stored, weight.bits)),
        "scales": weight.scales.T.contiguous(),
        "g_idx": weight.groups().to(torch.int32),
    }


def unpack_gptq(tensors: Mapping[str, Tensor], bits: int, version: int = 1) -> QuantizedWeight:
    """Return the weight that the tensors hold: the inverse of `pack_gptq`. `g_idx` may be absent: runs of inputs.

    `group_of` of the result is None where `g_idx` names runs of equal length. Raises InvalidArgumentError for shapes
    that do not fit together, and for a `g_idx` that names a group which is not there.
    """
    qweight, qzeros, scales = (tensors[name] for name in TENSORS)
    (groups, out), in_features = scales.shape, len(qweight) * 32 // bits
    if qweight.shape[1] != out or qzeros.shape != (groups, out * bits // 32) or (len(qweight) * 32) % bits:
        raise InvalidArgumentError(
            f"qweight has shape {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)}: "
            f"with {bits} bits they must be [in · {bits} / 32, out], [groups, out · {bits} / 32] and [groups, out]."
        )
    zeros = unpack_bits(to_bytes(qzeros), bits, out).T  # [out, groups]
    return QuantizedWeight(
        codes=unpack_bits(to_bytes(qweight.T), bits, in_features),
        scales=scales.T.contiguous(),
        # In uint8 255 + 1 is 0, so this is right for 8 bits too.
        zeros=((zeros + int(version == 1)) & (2**bits - 1)).contiguous(),
        bits=bits,
        group_of=read_order(tensors.get("g_idx"), in_features, groups, "g_idx"),
    )
