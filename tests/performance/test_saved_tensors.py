from functools import partial

import torch

from vllm_teach.performance.saved_tensors import Saved, saved_for_backward


def test_a_product_keeps_both_factors_and_a_sum_nothing() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    assert saved_for_backward(lambda: a @ b) == [Saved((3, 5), torch.float32, 60), Saved((5, 2), torch.float32, 40)]
    assert saved_for_backward(lambda: a + 1) == []


def test_tensors_that_share_memory_count_once() -> None:
    a = torch.randn(4, 4, requires_grad=True)
    (saved,) = saved_for_backward(lambda: a.exp().sin())  # exp keeps its result, which is the input that sin keeps
    assert saved == Saved((4, 4), torch.float32, 64)


def test_an_input_that_needs_no_gradient_does_not_make_its_partner_wait() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2)
    assert saved_for_backward(partial(torch.matmul, a, b)) == [Saved((5, 2), torch.float32, 40)]


def test_memory_freed_during_the_call_is_not_taken_for_another_tensors() -> None:
    """Each product is kept although its storage could be handed out again once the previous one is dropped."""
    a = torch.randn(64, 64, requires_grad=True)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            torch.randn(64, 64)
        x = a
        for _ in range(5):
            x = (x * 2).sin()
        return x

    assert len(saved_for_backward(forward)) == 5
