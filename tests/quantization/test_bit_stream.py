"""Packed rows against Python's whole numbers: row = sum of value i · 2^(i · bits), its bytes the lowest first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.quantization.bit_stream import pack_bits, stream_bytes, unpack_bits


def as_one_number(values: list[int], bits: int) -> bytes:
    total = sum(value << (i * bits) for i, value in enumerate(values))
    return total.to_bytes(-(-len(values) * bits // 8), "little")


@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.integers(1, 70))
def test_a_row_is_one_long_number(data, bits, count):
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    packed = pack_bits(torch.tensor(values, dtype=torch.uint8), bits)
    assert bytes(packed.tolist()) == as_one_number(values, bits)
    assert len(packed) == stream_bytes(count, bits)
    assert unpack_bits(packed, bits, count).tolist() == values


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_leading_dimensions_and_strides_do_not_matter(bits):
    values = torch.randint(2**bits, (5, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    turned = values.transpose(1, 2)  # not contiguous
    packed = pack_bits(turned, bits)
    assert packed.shape == (5, 3, 24 * bits // 8)
    assert torch.equal(packed[4, 2], pack_bits(turned[4, 2].clone(), bits))
    assert torch.equal(unpack_bits(packed, bits, 24), turned)
