"""The gradients of the norms: LayerNorm's own against finite differences and float64, RMSNorm's being PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_teach.kernels import norms
from vllm_teach.kernels.layer_norm_gradient import LayerNormFunction
from vllm_teach.kernels.norm_paths import NormPath

PLAIN = NormPath("plain", "float64 has no kernel")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 4), (6,)])
def test_layer_norm_against_finite_differences(shape: tuple[int, ...], with_weight: bool, with_bias: bool) -> None:
    weight = draw(shape[-1], seed=1) if with_weight else None
    bias = draw(shape[-1], seed=2) if with_bias else None

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        given = iter(parameters)
        return LayerNormFunction.apply(
            PLAIN, x, None if weight is None else next(given), None if bias is None else next(given), 1e-3
        )

    inputs = (draw(*shape), *(each for each in (weight, bias) if each is not None))
    assert torch.autograd.gradcheck(norm, inputs)
    assert torch.autograd.gradgradcheck(norm, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm_against_float64(dtype: torch.dtype) -> None:
    """Whoever computes the forward pass: float32 sums, and one rounding at the end."""
    x, weight, bias = draw(40, 576, dtype=dtype), draw(576, dtype=dtype, seed=1), draw(576, dtype=dtype, seed=2)
    dy = draw(40, 576, dtype=dtype, seed=3).detach()
    path = norms.explain("layer_norm", x, weight, bias)
    LayerNormFunction.apply(path, x, weight, bias, 1e-5).backward(dy)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    F.layer_norm(wide[0], (576,), *wide[1:]).backward(dy.double())
    for mine, expected in zip((x, weight, bias), wide, strict=True):
        assert mine.grad.dtype == dtype
        limit = torch.finfo(dtype).eps * expected.grad.abs() * 0.51 + 3e-6 * expected.grad.abs().max()
        assert ((mine.grad.double() - expected.grad).abs() <= limit).all()


def test_the_kernels_layer_norm_is_differentiated_by_its_own_formula() -> None:
    x = draw(4, 64, dtype=torch.float32)
    own = norms.explain("layer_norm", x).name == "cpu"
    assert (norms.layer_norm(x).grad_fn.name() == "LayerNormFunctionBackward") == own


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_what_is_wanted_is_differentiated(wanted: int) -> None:
    inputs = [draw(4, 8, dtype=torch.float32), draw(8, dtype=torch.float32, seed=1), draw(8, dtype=torch.float32)]
    for index, each in enumerate(inputs):
        each.requires_grad_(index == wanted)
    norms.layer_norm(*inputs).square().sum().backward()
    assert [each.grad is not None for each in inputs] == [index == wanted for index in range(3)]


@pytest.mark.parametrize("kind", norms.KINDS)
def test_both_results_of_a_fused_norm_are_differentiated(kind: str) -> None:
    x, residual = draw(4, 64, dtype=torch.float32), draw(4, 64, dtype=torch.float32, seed=1)
    weight = draw(64, dtype=torch.float32, seed=2)
    normalised, total = getattr(norms, f"add_{kind}")(x, residual, weight, eps=1e-5)
    (normalised.square().sum() + total.exp().sum()).backward()
    wide = [each.detach().double().requires_grad_() for each in (x, residual, weight)]
    summed = wide[0] + wide[1]
    centered = summed - summed.mean(-1, keepdim=True) if kind == "layer_norm" else summed
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[2]
    (expected.square().sum() + summed.exp().sum()).backward()
    for mine, theirs in zip((x, residual, weight), wide, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", norms.KINDS)
def test_frozen_and_unfollowed_calls_keep_no_graph(kind: str) -> None:
    norm = getattr(norms, kind)
    x = draw(4, 64, dtype=torch.float32)
    assert norm(x).requires_grad
    with torch.no_grad():
        assert not norm(x).requires_grad
    assert not norm(x.detach()).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # what torch.func.jvp imports
@pytest.mark.parametrize("kind", norms.KINDS)
def test_transforms_go_through_pytorch(kind: str) -> None:
    norm = getattr(norms, kind)
    x = draw(5, 64, dtype=torch.float32).detach()
    torch.testing.assert_close(torch.func.vmap(norm)(x), norm(x))
    expected = torch.autograd.functional.jvp(norm, x.double(), x.double())[1].float()
    torch.testing.assert_close(torch.func.jvp(norm, (x,), (x,))[1], expected, rtol=1e-4, atol=1e-5)
