import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.gptq_format import pack_gptq, unpack_gptq
from vllm_teach.quantization.quantized_weight import BITS, QuantizedWeight


def random_weight(
    out: int = 64,
    inputs: int = 96,
    groups: int = 3,
    bits: int = 4,
    *,
    act_order: bool = False,
    seed: int = 0,
    min_zero: int = 1,
) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (out, inputs), dtype=torch.uint8, generator=draw)
    zeros = torch.randint(min_zero, 2**bits, (out, groups), dtype=torch.uint8, generator=draw)
    zeros[:4, 0] = torch.tensor([min_zero, 2**bits - 1, min_zero, 1], dtype=torch.uint8)
    order = (torch.randperm(inputs, generator=draw) * groups // inputs).int() if act_order else None
    return QuantizedWeight(codes, torch.rand(out, groups, generator=draw).half() + 0.01, zeros, bits, order)


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    alike = (torch.equal(getattr(one, name), getattr(other, name)) for name in ("codes", "scales", "zeros"))
    return all(alike) and one.bits == other.bits and torch.equal(one.groups(), other.groups())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("version", [1, 2])
def test_round_trip_is_exact(bits, version, act_order):
    weight = random_weight(bits=bits, act_order=act_order, seed=bits, min_zero=int(version == 1))
    tensors = pack_gptq(weight, version)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ((96 * bits // 32, 64), torch.int32),
        "qzeros": ((3, 64 * bits // 32), torch.int32),
        "scales": ((3, 64), torch.float16),
        "g_idx": ((96,), torch.int32),
    }
    back = unpack_gptq(tensors, bits, version)
    assert same(back, weight)
    assert (back.group_of is None) == (not act_order)


def test_version_1_stores_each_zero_less_one_and_version_2_as_it_is():
    codes, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 1).half()
    weight = QuantizedWeight(codes, scales, torch.full((32, 1), 8, dtype=torch.uint8), 4)
    assert pack_gptq(weight, 1)["qzeros"].tolist() == [[0x77777777] * 4]
    assert pack_gptq(weight, 2)["qzeros"].tolist() == [[0x88888888 - 2**32] * 4]


def test_four_bits_lie_eight_inputs_to_a_word_from_the_lowest_nibble():
    codes = (torch.arange(32) % 8).to(torch.uint8).repeat(32, 1)
    weight = QuantizedWeight(codes, torch.ones(32, 1).half(), torch.ones(32, 1, dtype=torch.uint8), 4)
    assert pack_gptq(weight)["qweight"].tolist() == [[0x76543210] * 32] * 4


def test_three_bits_lie_as_the_published_packer_lays_them():
    """32 codes in three words: ten, one that crosses (2 + 1 bits), ten, one that crosses (1 + 2 bits), ten."""
    weight = random_weight(out=32, inputs=32, groups=1, bits=3)
    for o, code in enumerate(weight.codes.tolist()):
        words = [0, 0, 0]
        for j in range(10):
            words[0] |= code[j] << 3 * j
            words[1] |= code[11 + j] << (3 * j + 1)
            words[2] |= code[22 + j] << (3 * j + 2)
        words[0] |= (code[10] & 0b011) << 30
        words[1] |= code[10] >> 2 | (code[21] & 0b001) << 31
        words[2] |= code[21] >> 1
        stored = [word % 2**32 for word in pack_gptq(weight)["qweight"][:, o].tolist()]
        assert stored == words


@pytest.mark.parametrize("bits", BITS)
def test_a_zero_of_0_has_no_place_in_version_1_and_is_never_written(bits):
    with pytest.raises(InvalidArgumentError, match="zeros holds 0"):
        pack_gptq(random_weight(bits=bits, min_zero=0))


@pytest.mark.parametrize("bits", BITS)
def test_what_another_writer_spilt_is_masked(bits):
    """A zero of 0 written as -1 sets all bits from its place on: it reads as 0, whatever becomes of its neighbours."""
    weight = random_weight(bits=bits, groups=1)
    tensors = pack_gptq(weight)
    tensors["qzeros"][0, -bits:] = -1
    back = unpack_gptq(tensors, bits)
    assert back.zeros[-32:].tolist() == [[0]] * 32
    assert torch.equal(back.zeros[:-32], weight.zeros[:-32])


@pytest.mark.parametrize(("out", "inputs"), [(63, 96), (64, 40), (8, 8)])
def test_odd_shapes_are_refused(out, inputs):
    weight = random_weight(out=out, inputs=inputs, groups=1)
    with pytest.raises(InvalidArgumentError, match=rf"shape \[{out}, {inputs}\].*multiples of 32"):
        pack_gptq(weight)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_tensors_that_do_not_fit_together_are_refused(name):
    tensors = pack_gptq(random_weight())
    tensors[name] = tensors[name][:, :-1]
    with pytest.raises(InvalidArgumentError, match="they must be"):
        unpack_gptq(tensors, 4)


@pytest.mark.parametrize("order", [[0] * 95, [3] + [0] * 95, [-1] + [0] * 95])
def test_an_order_that_names_no_group_is_refused(order):
    tensors = pack_gptq(random_weight())
    with pytest.raises(InvalidArgumentError, match="g_idx has shape"):
        unpack_gptq({**tensors, "g_idx": torch.tensor(order, dtype=torch.int32)}, 4)


def test_without_an_order_groups_are_runs_of_inputs():
    weight = random_weight()
    tensors = pack_gptq(weight)
    del tensors["g_idx"]
    assert same(unpack_gptq(tensors, 4), weight)
