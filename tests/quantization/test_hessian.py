"""The Hessian against explicit sums in float64."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.hessian import Hessian, mean_square


def test_it_is_the_mean_of_twice_the_outer_products():
    x = torch.randn(4, 25, 12, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(12)
    for batch in x:
        hessian.add(batch)
    tokens = x.flatten(0, 1).double()
    torch.testing.assert_close(hessian.matrix, sum(2 * torch.outer(t, t) for t in tokens) / 100, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hessian.magnitudes, tokens.abs().mean(0), rtol=1e-12, atol=0)
    assert hessian.tokens == 100


def test_it_gives_the_mean_squared_output_of_any_weight():
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.randn(7, 12, generator=torch.Generator().manual_seed(2))
    hessian = Hessian(12)
    hessian.add(x)
    assert mean_square(weight, hessian.matrix) == pytest.approx((x @ weight.double().T).square().sum(1).mean().item())


def test_bfloat16_inputs_are_summed_wide():
    x = torch.full((5000, 2), 0.1, dtype=torch.bfloat16)
    hessian = Hessian(2)
    hessian.add(x)
    assert hessian.matrix[0, 1].item() == pytest.approx(2 * float(x[0, 0]) ** 2, rel=2e-4)


def test_refusals():
    hessian = Hessian(3)
    with pytest.raises(InvalidArgumentError, match="has seen no input"):
        hessian.matrix
    with pytest.raises(InvalidArgumentError, match=r"shape \[2, 4\]: the last size must be 3"):
        hessian.add(torch.zeros(2, 4))
    with pytest.raises(InvalidArgumentError, match="NaN or infinity"):
        hessian.add(torch.tensor([[0.0, torch.inf, 0.0]]))
    assert hessian.tokens == 0


@pytest.mark.parametrize("inputs", [torch.tensor(1.0), torch.full((2, 4), 1e25)])
def test_a_number_and_inputs_whose_squares_overflow_are_refused(inputs):
    with pytest.raises(InvalidArgumentError, match=r"inputs has shape|numbers whose squares are infinite"):
        Hessian(4).add(inputs)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_size_that_no_layer_has_is_refused(size):
    with pytest.raises(InvalidArgumentError, match=f"in_features={size} is not valid"):
        Hessian(size)
