"""Bytes of stored matrices against the package's own packed weights."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.packed_weight import pack
from vllm_teach.performance.cost_model.weight_format import QUANTIZED, WeightFormat, get_weight_format
from vllm_teach.quantization.rounding import quantize_rtn


@pytest.mark.parametrize("shape", [(64, 128), (37, 192), (16, 64)])
@pytest.mark.parametrize("weights", [WeightFormat("a", 4, 64), WeightFormat("b", 8, None), WeightFormat("c", 8, 32)])
def test_a_packed_matrix_has_as_many_bytes(shape: tuple[int, int], weights: WeightFormat) -> None:
    found = quantize_rtn(torch.rand(shape), weights.bits, group_size=weights.group_size)
    packed = pack(found.codes, found.scales, found.zeros, found.bits)
    assert weights.matrix_bytes(*shape) == packed.num_bytes


def test_a_plain_matrix() -> None:
    assert get_weight_format(None, "bfloat16").matrix_bytes(3, 5) == 30
    assert get_weight_format(None, "float32").matrix_bytes(3, 5) == 60


def test_four_bits_are_about_a_quarter() -> None:
    whole, quarter = get_weight_format(None, "float16"), get_weight_format("awq", "float16")
    assert quarter.matrix_bytes(4096, 4096) / whole.matrix_bytes(4096, 4096) == pytest.approx(0.25 + 3 / 64 / 2)


def test_what_is_unknown_is_listed() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        get_weight_format("fp4", "bfloat16")
    assert all(name in str(caught.value) for name in QUANTIZED)
    with pytest.raises(InvalidArgumentError, match=r"dtype='float64' .* float32, bfloat16, float16"):
        get_weight_format(None, "float64")
    with pytest.raises(InvalidArgumentError, match="group_size=64 does not divide the 100 inputs"):
        WeightFormat("a", 4, 64).matrix_bytes(16, 100)
