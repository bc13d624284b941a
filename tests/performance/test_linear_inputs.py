import pytest
import torch
import torch.nn.functional as F

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.load import load_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.performance.linear_inputs import input_magnitudes, largest_to_median, linear_inputs

NAME = "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def tiny():
    return load_model(resolve_model("tiny"))


def inputs_by_hook(model, name, ids):
    """What the named module is called with, one sequence at a time."""
    found = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    for row in ids:
        model(row, torch.arange(len(row)), full_causal())
    hook.remove()
    return torch.cat(found)


def test_the_inputs_are_those_of_the_forward_pass(tiny):
    ids = torch.randint(2048, (2, 24), generator=torch.Generator().manual_seed(0))
    found = linear_inputs(tiny, ids, NAME)
    assert torch.equal(found.weight, tiny.get_parameter(f"{NAME}.weight"))
    torch.testing.assert_close(found.inputs, inputs_by_hook(tiny, NAME, ids), rtol=1e-4, atol=1e-5)
    assert F.linear(found.inputs, found.weight).shape == (48, 256)


def test_magnitudes_of_all_layers(tiny):
    ids = torch.randint(2048, (2, 24), generator=torch.Generator().manual_seed(1))
    magnitudes = input_magnitudes(tiny, ids)
    assert len(magnitudes) == 28
    torch.testing.assert_close(magnitudes[NAME], linear_inputs(tiny, ids, NAME).inputs.abs().mean(0))
    assert largest_to_median({"a": torch.tensor([1.0, 2.0, 8.0])}) == [4.0]


def test_an_unknown_layer_is_refused(tiny):
    with pytest.raises(InvalidArgumentError, match="no linear layer"):
        linear_inputs(tiny, torch.zeros(1, 4, dtype=torch.int64), "model.layers.9.mlp.down_proj")
