"""Tensors that make no quantised weight are refused where they are put together, not where they are used."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.quantized_weight import QuantizedWeight


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 4.0}, "bits=4.0 is not valid"),
        ({"codes": torch.zeros(4, 0).byte()}, r"codes has shape \[4, 0\], .* and not empty"),
        ({"codes": torch.full((4, 16), 16).byte()}, "codes holds 16, and 4 bits end at 15"),
        ({"zeros": torch.full((4, 2), 255).byte()}, "zeros holds 255, and 4 bits end at 15"),
        ({"codes": torch.zeros(4, 16)}, r"are torch\.float32, torch\.float16, torch\.uint8: they must be uint8"),
        ({"scales": torch.ones(4, 2)}, r"are torch\.uint8, torch\.float32, torch\.uint8"),
        ({"scales": torch.ones(2).half(), "zeros": torch.zeros(2).byte()}, r"scales \[2\] and zeros \[2\]"),
        ({"scales": torch.ones(4, 0).half(), "zeros": torch.zeros(4, 0).byte()}, "scales has 0 groups for 16 inputs"),
        ({"scales": torch.ones(4, 3).half(), "zeros": torch.zeros(4, 3).byte()}, "scales has 3 groups for 16 inputs"),
        ({"group_of": torch.zeros(15).int()}, r"group_of has shape \[15\]"),
        ({"group_of": torch.zeros(16)}, r"and dtype torch\.float32: give the group of each of 16 inputs as int32"),
        ({"group_of": torch.full((16,), 2).int()}, "group_of names groups 2 to 2: there are 0 to 1"),
        ({"group_of": torch.full((16,), -1).int()}, "group_of names groups -1 to -1"),
    ],
)
def test_tensors_that_do_not_fit_together(changes, words):
    good = {
        "codes": torch.zeros(4, 16).byte(),
        "scales": torch.ones(4, 2).half(),
        "zeros": torch.zeros(4, 2).byte(),
        "bits": 4,
        "group_of": torch.tensor([0, 1] * 8).int(),
    }
    assert torch.equal(QuantizedWeight(**good).dequantize(), torch.zeros(4, 16))
    if "group_of" not in changes:
        good["group_of"] = None
    with pytest.raises(InvalidArgumentError, match=words):
        QuantizedWeight(**{**good, **changes})
