"""A part of a quantised matrix, as one rank of several has it."""

from __future__ import annotations

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.quantized_weight import QuantizedWeight


def part_of(module: str, weight: QuantizedWeight, rows: slice, columns: slice) -> QuantizedWeight:
    """Return those rows and columns of the `weight` of `module`: the same codes, scales and zeros.

    Raises InvalidArgumentError where `columns` cut through a group of inputs that share a scale, or leave a part of
    groups whose inputs lie apart (GPTQ's act-order).
    """
    first, end, _ = columns.indices(weight.in_features)
    codes, scales, zeros = weight.codes[rows, columns], weight.scales[rows], weight.zeros[rows]
    if end - first == weight.in_features or (weight.num_groups == 1 and weight.group_of is None):
        return QuantizedWeight(codes, scales, zeros, weight.bits, weight.group_of)
    size = weight.in_features // weight.num_groups
    if weight.group_of is not None:
        raise InvalidArgumentError(
            f"tensor_parallel_size cuts {module}, whose groups of inputs lie apart: use 1, or quantise the model "
            "without act_order."
        )
    if first % size or end % size:
        raise InvalidArgumentError(
            f"tensor_parallel_size cuts {module} at inputs {first} and {end}, within its groups of {size}: use another "
            "size, or quantise the model with a group_size that divides these."
        )
    groups = slice(first // size, end // size)
    return QuantizedWeight(codes, scales[:, groups], zeros[:, groups], weight.bits)
