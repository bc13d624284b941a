import subprocess
import sys

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.memory import OUTSIDE, peak_memory, region, trace_memory

X = torch.ones(500, 1000)
BYTES = X.numel() * 4


def test_one_allocation() -> None:
    assert peak_memory(lambda: torch.empty(1000, dtype=torch.float64)) == 8000


def test_what_was_there_before_does_not_count() -> None:
    assert peak_memory(lambda: X.sum()) < 1000


def test_a_result_of_an_operator_counts() -> None:
    assert peak_memory(lambda: torch.softmax(X, -1)) == BYTES


def test_a_temporary_inside_an_operator_counts() -> None:
    # logsumexp returns 2 kB, and in between holds x - max(x), as large as x.
    assert BYTES <= peak_memory(lambda: torch.logsumexp(X, -1)) <= 1.01 * BYTES


def test_released_memory_is_used_again() -> None:
    def chain() -> torch.Tensor:
        y = X
        for _ in range(10):
            y = y.exp()
        return y

    # Old and new are alive together while the next one is computed, and never a third.
    assert peak_memory(chain) == 2 * BYTES


def test_kept_memory_adds_up() -> None:
    assert peak_memory(lambda: [X.neg() for _ in range(5)]) == 5 * BYTES


def test_views_and_in_place_operators_cost_nothing() -> None:
    y = X.clone()
    assert peak_memory(lambda: y.t()[:100].unsqueeze(0).expand(8, -1, -1)) == 0
    assert peak_memory(lambda: y.neg_().abs_()) == 0


def test_a_peak_in_the_middle_is_found() -> None:
    def hump() -> torch.Tensor:
        big = torch.empty(10 * X.numel())
        small = big[:10].clone()
        del big
        return small

    assert peak_memory(hump) == 10 * BYTES + 40


def test_the_backward_pass_counts() -> None:
    weight = torch.ones(1000, 1000, requires_grad=True)

    def step() -> None:
        (X @ weight).square().sum().backward()

    assert peak_memory(step) >= 4_000_000 + BYTES  # the gradient and the activation


def test_the_count_is_the_same_each_time() -> None:
    def work() -> torch.Tensor:
        return torch.softmax(X @ X.t(), -1) @ X

    assert len({peak_memory(work) for _ in range(3)}) == 1


def test_regions_split_the_peak_and_the_allocations() -> None:
    def work() -> torch.Tensor:
        before = X.neg()
        with region("inner"):
            twice = torch.cat([before, before])
            thrice = torch.cat([before, before, before])
        del twice
        return thrice

    trace = trace_memory(work, {"inner"})
    assert trace.peak == 6 * BYTES
    assert trace.at_peak == {OUTSIDE: BYTES, "inner": 5 * BYTES}
    assert trace.allocated == {OUTSIDE: BYTES, "inner": 5 * BYTES}
    assert [(step.operator, step.delta, step.live) for step in trace.steps][:3] == [
        ("aten::neg", BYTES, BYTES),
        ("aten::cat", 2 * BYTES, 3 * BYTES),
        ("aten::cat", 3 * BYTES, 6 * BYTES),
    ]
    assert {step.region for step in trace.steps if step.operator == "aten::cat"} == {"inner"}


def test_a_release_in_another_region_is_charged_to_the_owner() -> None:
    def work() -> torch.Tensor:
        held = [X.neg()]
        with region("inner"):
            held.clear()
            held.append(torch.cat([X, X, X]))
        return held[0]

    trace = trace_memory(work, {"inner"})
    assert trace.peak == 3 * BYTES
    assert trace.at_peak == {OUTSIDE: 0, "inner": 3 * BYTES}


def test_an_error_of_the_function_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 // 0)


def test_an_unknown_device() -> None:
    with pytest.raises(InvalidArgumentError, match="device='tpu'"):
        peak_memory(lambda: None, device="tpu")


def test_nothing_is_printed() -> None:
    # The profiler writes to the process's standard error behind Python's back: a notebook would show it.
    code = "import torch; from vllm_teach.performance import peak_memory; print(peak_memory(lambda: torch.empty(25)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "100\n"
    assert done.stderr == ""


def test_on_cuda_a_first_call_warms_up_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # An allocator in which the first product leaves a workspace of 8 MB behind, as cuBLAS does.
    held = {"now": 1000, "peak": 1000}
    calls: list[str] = []

    def allocate(nbytes: int) -> None:
        held["now"] += nbytes
        held["peak"] = max(held["peak"], held["now"])

    def product() -> None:
        if not calls:
            allocate(8_000_000)
        calls.append("product")
        allocate(512)
        held["now"] -= 512

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: held["peak"])
    assert peak_memory(product, device="cuda") == 512
    assert len(calls) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False")
def test_cuda_counts_whole_allocations() -> None:
    assert peak_memory(lambda: torch.empty(1024, device="cuda"), device="cuda") == 4096


def test_a_trace_inside_a_trace_is_refused_and_the_next_one_works() -> None:
    with pytest.raises(InvalidArgumentError, match="inside another trace"):
        peak_memory(lambda: peak_memory(lambda: torch.ones(1000)))
    assert peak_memory(lambda: torch.ones(1000)) == 4000


def test_a_trace_inside_pytorchs_own_profiler_is_refused() -> None:
    with torch.profiler.profile(), pytest.raises(InvalidArgumentError, match="inside another trace or profiler"):
        trace_memory(lambda: torch.ones(1000))


def test_a_device_may_be_an_object() -> None:
    assert peak_memory(lambda: torch.ones(1000), torch.device("cpu")) == 4000


@pytest.mark.parametrize("device", ["mps", "gpu", None])
def test_a_device_without_a_counter_is_refused(device: object) -> None:
    with pytest.raises(InvalidArgumentError, match="has no memory counter here"):
        peak_memory(lambda: None, device)  # type: ignore[arg-type]


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="device='cuda' is not there"):
        peak_memory(lambda: None, "cuda")
