"""AutoAWQ's layout of a weight ("gemm"): 4 bits, eight output channels to an int32 word, in its kernels' order.

`qweight` is int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]`, `scales` float16 `[groups, out]`: the matrix
stands transposed, as the kernels read it. In a word the channels lie in the order 0, 2, 4, 6, 1, 3, 5, 7, because a
GPU widens the even and the odd halves of a word to float16 at once. Groups are runs of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.bit_stream import pack_bits, to_bytes, to_words, unpack_bits
from vllm_teach.quantization.quantized_weight import QuantizedWeight

BITS = 4
PER_WORD = 8
# Nibble i of a word, from the lowest, holds channel ORDER[i] of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = tuple(ORDER.index(channel) for channel in range(PER_WORD))
TENSORS = ("qweight", "qzeros", "scales")


def check_awq_shape(out_features: int, name: str = "weight") -> None:
    """Raise InvalidArgumentError when a matrix with so many rows, which `name` names, does not fill whole words."""
    if out_features % PER_WORD:
        raise InvalidArgumentError(
            f"{name} has {out_features} output channels, and an AutoAWQ word holds {PER_WORD}: give a multiple of "
            f"{PER_WORD}, or keep this model in the package's own format (head_bits=8, or the method 'rtn')."
        )


def pack_awq(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return `qweight`, `qzeros` and `scales` of `weight`.

    Raises InvalidArgumentError for other than 4 bits, for groups that are no runs of inputs, and for a number of
    output channels that 8 does not divide.
    """
    if weight.bits != BITS:
        raise InvalidArgumentError(f"bits={weight.bits} does not fit AutoAWQ's layout: it holds {BITS} bits only.")
    if weight.group_of is not None:
        raise InvalidArgumentError(
            "group_of is given, but AutoAWQ's layout has no order of inputs: quantise without act_order."
        )
    check_awq_shape(weight.out_features)
    return {
        "qweight": _to_words(weight.codes.T),
        "qzeros": _to_words(weight.zeros.T),
        "scales": weight.scales.T.contiguous(),
    }


def unpack_awq(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """Return the weight that `qweight`, `qzeros` and `scales` hold: the inverse of `pack_awq`.

    Raises InvalidArgumentError for shapes that do not fit together.
    """
    qweight, qzeros, scales = (tensors[name] for name in TENSORS)
    words, groups = qweight.shape[1], len(scales)
    if scales.shape[1] != words * PER_WORD or qzeros.shape != (groups, words) or not groups or len(qweight) % groups:
        raise InvalidArgumentError(
            f"qweight has shape {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)}: "
            "they must be [in, out / 8], [groups, out / 8] and [groups, out]."
        )
    return QuantizedWeight(_from_words(qweight), scales.T.contiguous(), _from_words(qzeros), BITS)


def _to_words(values: Tensor) -> Tensor:
    """Pack `[rows, out]` into int32 `[rows, out / 8]`."""
    ordered = values.unflatten(1, (-1, PER_WORD))[..., ORDER].flatten(1)
    return to_words(pack_bits(ordered, BITS))


def _from_words(words: Tensor) -> Tensor:
    """Unpack int32 `[rows, out / 8]` and turn it, uint8 `[out, rows]`."""
    values = unpack_bits(to_bytes(words), BITS, words.shape[1] * PER_WORD)
    return values.unflatten(1, (-1, PER_WORD))[..., _PLACE].flatten(1).T.contiguous()
