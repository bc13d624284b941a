from functools import partial

import torch

from vllm_teach.performance.saved_tensors import Saved, saved_for_backward


def test_a_product_keeps_both_factors_and_a_sum_nothing() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    saved = sorted(saved_for_backward(lambda: a @ b), key=lambda one: one.nbytes)
    assert saved == [Saved((5, 2), torch.float32, 40), Saved((3, 5), torch.float32, 60)]
    assert saved_for_backward(lambda: a + 1) == []


def test_tensors_that_share_memory_count_once() -> None:
    a = torch.randn(4, 4, requires_grad=True)
    (saved,) = saved_for_backward(lambda: a.exp().sin())  # exp keeps its result, which is the input that sin keeps
    assert saved == Saved((4, 4), torch.float32, 64)


def test_an_input_that_needs_no_gradient_does_not_make_its_partner_wait() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2)
    assert saved_for_backward(partial(torch.matmul, a, b)) == [Saved((5, 2), torch.float32, 40)]


def test_memory_that_is_freed_during_the_call_counts_each_time() -> None:
    """The allocator hands out the same address again: it must not be taken for the same tensor."""
    a = torch.randn(64, 64, requires_grad=True)

    def forward() -> torch.Tensor:
        for _ in range(5):
            (a * 2).sin()  # saves a * 2, and drops it with its graph
        return a

    assert len(saved_for_backward(forward)) == 5
