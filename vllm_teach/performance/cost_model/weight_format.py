"""How the weights of linear layers are stored, and what they then weigh.

Codes lie in panels of 16 rows, as the package's own kernel reads them (`kernels.packed_weight`); other layouts of the
same codes weigh the same but for padding and the zeros of a group, which take 4 bits there and 8 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError

# Bytes of a number. "tf32" is a way to multiply float32.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PANEL_ROWS, _PANEL_ALIGNMENT = 16, 64
_SCALE_AND_ZERO = 3  # bytes of a group: float16 and uint8


@dataclass(frozen=True)
class WeightFormat:
    """`bits` of a stored weight. Below 16, `group_size` inputs share a scale and a zero; None: a whole row does."""

    name: str
    bits: int
    group_size: int | None = None

    @property
    def quantized(self) -> bool:
        """Whether there are codes and scales."""
        return self.bits < 16

    @property
    def unit(self) -> int:
        """How many inner units of an MLP must stay together when it is cut: whole groups and panels."""
        return math.lcm(self.group_size or 1, _PANEL_ROWS) if self.quantized else 1

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix `[rows, columns]`. Raises InvalidArgumentError where groups do not divide it."""
        if not self.quantized:
            return rows * columns * self.bits // 8
        group = self.group_size or columns
        if columns % group:
            raise InvalidArgumentError(
                f"group_size={group} does not divide the {columns} inputs of a layer: use another weight format."
            )
        panel = _PANEL_ROWS * (columns * self.bits // 8 + columns // group * _SCALE_AND_ZERO)
        panel += -panel % _PANEL_ALIGNMENT
        return -(-rows // _PANEL_ROWS) * panel


# The formats that `vllm-teach quantize` writes by default; GPTQ, AWQ and rounding (RTN) differ in the codes alone.
QUANTIZED = {
    "int8": WeightFormat("int8", 8),
    "awq": WeightFormat("awq", 4, 64),
    "gptq": WeightFormat("gptq", 4, 64),
    "rtn": WeightFormat("rtn", 4, 64),
}


def element_bytes(dtype: str) -> int:
    """Return the bytes of a number. Raises InvalidArgumentError, listing all, for a dtype that models do not have."""
    if dtype not in DTYPE_BYTES:
        raise InvalidArgumentError(f"dtype={dtype!r} is none of a model: use one of {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[dtype]


def get_weight_format(quantization: str | None, dtype: str) -> WeightFormat:
    """Return the format of a model quantised by `quantization`, or of an unquantised one in `dtype` for None.

    Raises InvalidArgumentError, listing what there is, for another method or dtype.
    """
    if quantization is None:
        return WeightFormat(dtype, 8 * element_bytes(dtype))
    if quantization not in QUANTIZED:
        raise InvalidArgumentError(
            f"quantization={quantization!r} is not known: use one of {', '.join(QUANTIZED)}, or None."
        )
    return QUANTIZED[quantization]
