"""The attention of training against PyTorch's, through a whole decoder: outputs and gradients."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.training import window_attend
from vllm_teach.training.model import initial_model

BATCH, WINDOW = 3, 16


@pytest.fixture
def gradients(toy_config):
    """run(attention, p, **changes) -> (loss, gradients by name) of the toy decoder in float64."""

    def run(attention: str, p: float = 0.0, config: ModelConfig = toy_config):
        model = initial_model(config, seed=1).double()
        ids = torch.randint(24, (BATCH * WINDOW,), generator=torch.Generator().manual_seed(5))
        torch.manual_seed(9)  # of dropout
        hidden = model(ids, torch.arange(WINDOW).repeat(BATCH), window_attend(BATCH, attention, p))
        loss = torch.nn.functional.cross_entropy(model.logits(hidden) * 20, ids.roll(-1))
        loss.backward()
        return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}

    return run


def assert_equal(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    for name, gradient in theirs[1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("attention", ["memory_efficient", "tiled", "naive"])
def test_gradients_of_the_decoder_equal_sdpas(gradients, attention):
    assert_equal(gradients(attention), gradients("sdpa"))


@pytest.mark.parametrize("attention", ["memory_efficient", "tiled"])
def test_with_dropout_they_equal_the_naive_formulas(gradients, attention):
    """One seed gives one mask, whoever computes with it."""
    assert_equal(gradients(attention, 0.3), gradients("naive", 0.3))
    assert gradients(attention, 0.3)[0] != gradients(attention)[0]


def test_a_sliding_window_too(gradients, toy_config):
    sliding = ModelConfig(**{**vars(toy_config), "sliding_window": 4, "sliding_layers": (True, False)})
    assert_equal(gradients("memory_efficient", config=sliding), gradients("sdpa", config=sliding))
    assert gradients("memory_efficient", config=sliding)[0] != gradients("memory_efficient")[0]


def test_windows_do_not_see_each_other(toy_config):
    model = initial_model(toy_config, seed=1).eval()
    ids = torch.randint(24, (2, WINDOW), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(WINDOW)
    both = model(ids.flatten(), positions.repeat(2), window_attend(2))
    alone = [model(row, positions, window_attend(1)) for row in ids]
    torch.testing.assert_close(both, torch.cat(alone))


def test_unknown_names_are_refused():
    with pytest.raises(InvalidArgumentError, match="no attention backend 'nothing'"):
        window_attend(2, "nothing")
