import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.awq_format import pack_awq, unpack_awq
from vllm_teach.quantization.quantized_weight import QuantizedWeight


def random_weight(out: int = 24, inputs: int = 40, groups: int = 5, bits: int = 4, seed: int = 0) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (out, inputs), dtype=torch.uint8, generator=draw)
    zeros = torch.randint(2**bits, (out, groups), dtype=torch.uint8, generator=draw)
    zeros[0, 0], zeros[1, 0] = 0, 2**bits - 1
    return QuantizedWeight(codes, torch.rand(out, groups, generator=draw).half() + 0.01, zeros, bits)


def test_the_order_of_the_channels_in_a_word():
    # Channel o of input 0 has the code o: from the lowest nibble, the word reads 0 2 4 6 1 3 5 7.
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 2)
    weight = QuantizedWeight(codes, torch.ones(8, 1).half(), 15 - torch.arange(8, dtype=torch.uint8)[:, None], 4)
    tensors = pack_awq(weight)
    assert tensors["qweight"].tolist() == [[0x75316420], [0x75316420]]
    assert tensors["qzeros"].tolist() == [[int.from_bytes(bytes.fromhex("8ACE9BDF"), "big") - 2**32]]


@pytest.mark.parametrize("seed", range(5))
def test_round_trip_is_exact(seed):
    weight = random_weight(seed=seed)
    tensors = pack_awq(weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ((40, 3), torch.int32),
        "qzeros": ((5, 3), torch.int32),
        "scales": ((5, 24), torch.float16),
    }
    back = unpack_awq(tensors)
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(back, name), getattr(weight, name)), name
    assert (back.bits, back.group_of) == (4, None)


@pytest.mark.parametrize(
    ("weight", "complaint"),
    [
        (random_weight(out=12), "weight has 12 output channels"),
        (random_weight(bits=3), "bits=3 does not fit"),
        (
            QuantizedWeight(
                torch.zeros(8, 4, dtype=torch.uint8),
                torch.ones(8, 2).half(),
                torch.zeros(8, 2, dtype=torch.uint8),
                4,
                torch.tensor([1, 0, 1, 0], dtype=torch.int32),
            ),
            "group_of is given",
        ),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(weight, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        pack_awq(weight)


def test_tensors_without_groups_are_refused():
    """Once a division by zero."""
    tensors = pack_awq(random_weight())
    with pytest.raises(InvalidArgumentError, match="they must be"):
        unpack_awq({**tensors, "qzeros": tensors["qzeros"][:0], "scales": tensors["scales"][:0]})


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_tensors_that_do_not_fit_together_are_refused(name):
    tensors = pack_awq(random_weight())
    tensors[name] = tensors[name][:, :-1]
    with pytest.raises(InvalidArgumentError, match="they must be"):
        unpack_awq(tensors)
