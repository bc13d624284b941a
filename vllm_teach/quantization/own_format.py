"""The package's own layout of a weight, for what the published ones cannot hold: 2, 3, 4 or 8 bits, row by row.

`codes` is uint8 `[out, in · bits / 8]`, the bit stream of each output channel, as the CPU reads it; `zeros` uint8
`[out, ceil(groups · bits / 8)]`, likewise; `scales` float16 `[out, groups]`; `group_of` int32 `[in]` only where groups
are no runs of inputs. An embedding has a token's row where a linear layer has an output channel.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.bit_stream import pack_bits, stream_bytes, unpack_bits
from vllm_teach.quantization.group_order import read_order
from vllm_teach.quantization.quantized_weight import QuantizedWeight

TENSORS = ("codes", "scales", "zeros")


def pack_own(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return `codes`, `scales`, `zeros` and, where `weight` has it, `group_of`.

    Raises InvalidArgumentError when a row does not fill whole bytes.
    """
    if weight.in_features * weight.bits % 8:
        raise InvalidArgumentError(
            f"weight has {weight.in_features} inputs, which in {weight.bits} bits fill no whole bytes: give a multiple "
            "of 8."
        )
    tensors = {
        "codes": pack_bits(weight.codes, weight.bits),
        "scales": weight.scales.contiguous(),
        "zeros": pack_bits(weight.zeros, weight.bits),
    }
    # A copy: q, k and v have one order, and a file does not take one tensor under three names.
    return tensors if weight.group_of is None else {**tensors, "group_of": weight.group_of.clone()}


def unpack_own(tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
    """Return the weight that the tensors hold: the inverse of `pack_own`.

    Raises InvalidArgumentError for shapes that do not fit together.
    """
    codes, scales, zeros = (tensors[name] for name in TENSORS)
    (out, groups), in_features = scales.shape, codes.shape[1] * 8 // bits
    if len(codes) != out or zeros.shape != (out, stream_bytes(groups, bits)) or codes.shape[1] * 8 % bits:
        raise InvalidArgumentError(
            f"codes has shape {list(codes.shape)}, zeros {list(zeros.shape)} and scales {list(scales.shape)}: with "
            f"{bits} bits they must be [out, in · {bits} / 8], [out, ceil(groups · {bits} / 8)] and [out, groups]."
        )
    return QuantizedWeight(
        codes=unpack_bits(codes, bits, in_features),
        scales=scales,
        zeros=unpack_bits(zeros, bits, groups),
        bits=bits,
        group_of=read_order(tensors.get("group_of"), in_features, groups, "group_of"),
    )
