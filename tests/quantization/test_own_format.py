import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.own_format import pack_own, unpack_own
from vllm_teach.quantization.quantized_weight import BITS, QuantizedWeight


def random_weight(out: int, inputs: int, groups: int, bits: int, *, act_order: bool = False) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(2**bits, (out, inputs), dtype=torch.uint8, generator=draw)
    zeros = torch.randint(2**bits, (out, groups), dtype=torch.uint8, generator=draw)
    order = (torch.randperm(inputs, generator=draw) * groups // inputs).int() if act_order else None
    return QuantizedWeight(codes, torch.rand(out, groups, generator=draw).half() + 0.01, zeros, bits, order)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("bits", BITS)
def test_round_trip_is_exact(bits, groups, act_order):
    weight = random_weight(7, 120, groups, bits, act_order=act_order and groups > 1)
    tensors = pack_own(weight)
    assert tensors["codes"].numel() == 7 * 120 * bits // 8
    assert tensors["zeros"].numel() == 7 * -(-groups * bits // 8)
    back = unpack_own(tensors, bits)
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(back, name), getattr(weight, name)), name
    assert torch.equal(back.groups(), weight.groups())
    assert (back.group_of is None) == (weight.group_of is None)


def test_four_bits_lie_two_inputs_to_a_byte_from_the_lowest_nibble():
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    weight = QuantizedWeight(codes, torch.ones(1, 2).half(), torch.tensor([[5, 6]], dtype=torch.uint8), 4)
    assert {name: tensor.tolist() for name, tensor in pack_own(weight).items()} == {
        "codes": [[0x21, 0x43]],
        "zeros": [[0x65]],
        "scales": [[1.0, 1.0]],
    }


@pytest.mark.parametrize(("inputs", "bits"), [(12, 3), (9, 4), (6, 2)])
def test_a_row_that_fills_no_whole_bytes_is_refused(inputs, bits):
    with pytest.raises(InvalidArgumentError, match=f"weight has {inputs} inputs, which in {bits} bits"):
        pack_own(random_weight(4, inputs, 1, bits))


@pytest.mark.parametrize("name", ["codes", "zeros", "scales"])
def test_tensors_that_do_not_fit_together_are_refused(name):
    tensors = pack_own(random_weight(8, 48, 3, 4))
    tensors[name] = tensors[name][:-1]
    with pytest.raises(InvalidArgumentError, match="they must be"):
        unpack_own(tensors, 4)
