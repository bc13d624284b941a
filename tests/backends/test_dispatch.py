"""One call for all: it selects, it runs, it counts."""

import threading
from dataclasses import dataclass

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Varlen
from vllm_teach.attention.patterns import LocalWindow, Pattern
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import counts, sdpa
from vllm_teach.backends.hardware import Hardware, detect_hardware
from vllm_teach.backends.selection import refusals, select_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    backends.reset_calls()


def test_the_chosen_backend_runs_and_is_counted(make_qkv) -> None:
    q, k, v = make_qkv(20, 30)
    for pattern_of_choice in ({"causal": True}, {"causal": True, "softcap": 3.0}):
        choice = select_backend(AttentionSpec.of(q, k, v, **pattern_of_choice)).choice
        before = backends.calls().get(choice, backends.Calls(0, 0.0)).calls
        out = backends.attend(q, k, v, **pattern_of_choice)
        torch.testing.assert_close(out, naive_attention(q, k, v, **pattern_of_choice), rtol=0, atol=1e-10)
        assert backends.calls()[choice].calls == before + 1
    assert sum(one.calls for one in backends.calls().values()) == 2
    assert all(one.seconds > 0 for one in backends.calls().values())


def test_a_named_backend_is_asked_and_no_other(make_qkv) -> None:
    q, k, v = make_qkv(5, 5)
    backends.attend(q, k, v, backend="tiled")
    assert list(backends.calls()) == ["tiled"]
    with pytest.raises(InvalidArgumentError, match="sdpa has no softcap"):
        backends.attend(q, k, v, backend="sdpa", softcap=1.0)
    with pytest.raises(InvalidArgumentError, match="no attention backend 'fast'"):
        backends.attend(q, k, v, backend="fast")
    assert list(backends.calls()) == ["tiled"]  # what failed is not counted


def test_layouts_and_thresholds_are_passed_on(make_qkv) -> None:
    q, k, v = (tensor[0].float() for tensor in make_qkv(6, 6))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    layout = Varlen(starts, starts)
    out = backends.attend(q, k, v, layout=layout, causal=True)
    torch.testing.assert_close(out[2:], naive_attention(q[None, 2:], k[None, 2:], v[None, 2:], causal=True)[0])
    with pytest.raises(InvalidArgumentError, match="policy is 'best'"):
        backends.attend(q, k, v, layout=layout, policy="best")


def test_a_library_that_fails_when_it_is_first_used_is_replaced_with_a_warning(make_qkv, monkeypatch) -> None:
    q, k, v = make_qkv(5, 5)
    state: dict[str, str | None] = {"problem": None}

    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        state["problem"] = "It does not build."
        raise MissingDependencyError("It does not build.")

    monkeypatch.setattr(sdpa, "run", fail)
    monkeypatch.setattr(sdpa, "unavailable", lambda: state["problem"])
    detect_hardware.cache_clear()
    assert select_backend(AttentionSpec.of(q, k, v)).choice == "sdpa"
    with pytest.warns(RuntimeWarning, match=r"The backend sdpa failed, .* serves instead\. It does not build\."):
        out = backends.attend(q, k, v)
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=0, atol=1e-10)
    assert "sdpa" not in backends.calls()
    assert select_backend(AttentionSpec.of(q, k, v)).others["sdpa"] == "It does not build."
    backends.attend(q, k, v)  # and now without a warning
    detect_hardware.cache_clear()


def test_libraries_that_fail_one_after_the_other_are_all_replaced(make_qkv, monkeypatch) -> None:
    """sdpa fails, then the one after it, then the one after that: the first that works serves."""
    q, k, v = make_qkv(5, 5)
    failed: list[str] = []
    order = [name for name in ("sdpa", "cpu", "flex", "memory_efficient") if name not in usable_problems(q, k, v)]

    def break_it(name: str) -> None:
        def fail(*args: object, **kwargs: object) -> torch.Tensor:
            failed.append(name)
            raise MissingDependencyError(f"{name} does not load.")

        monkeypatch.setattr(backends.get(name), "run", fail)
        monkeypatch.setattr(
            backends.get(name), "unavailable", lambda: f"{name} does not load." if name in failed else None
        )

    for name in order:
        break_it(name)
    detect_hardware.cache_clear()
    with pytest.warns(RuntimeWarning, match="serves instead") as caught:
        out = backends.attend(q, k, v)
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=0, atol=1e-10)
    assert failed == order
    assert len(order) >= 2
    assert len(caught) == len(order)
    assert list(backends.calls()) == ["tiled"]
    detect_hardware.cache_clear()


def usable_problems(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, str]:
    return refusals(AttentionSpec.of(q, k, v), detect_hardware())


def test_a_failure_that_stays_is_raised(make_qkv, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        raise MissingDependencyError("It does not load.")

    monkeypatch.setattr(sdpa, "run", fail)
    with pytest.raises(MissingDependencyError, match="It does not load"):
        backends.attend(*make_qkv(5, 5))


def test_calls_from_many_threads_are_all_counted() -> None:
    def work() -> None:
        for _ in range(500):
            counts.record_call("x", 0.25)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backends.calls() == {"x": backends.Calls(4000, 1000.0)}
    backends.calls().clear()  # a copy
    assert backends.calls() != {}


def test_hardware_is_a_value() -> None:
    assert Hardware((8, 0)) == Hardware((8, 0))
    assert Hardware((8, 0)).has_tensor_cores
    assert not Hardware((6, 1)).has_tensor_cores
    assert not Hardware().has_tensor_cores
    assert Hardware((9, 0)).describe("cuda") == "GPU of compute capability 9.0"
    assert Hardware(None, frozenset({"avx512", "avx2"})).describe("cpu") == "CPU with AVX2 and AVX-512"


def test_a_pattern_without_a_hash_is_named(make_qkv) -> None:
    """Choices and masks are kept by their pattern; one that can change would be answered with the mask it was."""

    @dataclass
    class Recent(Pattern):
        width: int = 3

        def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
            return (k_pos <= q_pos) & (k_pos > q_pos - self.width)

    q, k, v = make_qkv(5, 5)
    for pattern in (Recent(), Recent() & LocalWindow(9), ~Recent()):
        with pytest.raises(InvalidArgumentError, match=r"^pattern is .*Recent.*; make its class a dataclass"):
            backends.attend(q, k, v, pattern=pattern)
    frozen = dataclass(frozen=True)(type("Recent", (Pattern,), {"sees": lambda self, q, k: Recent().sees(q, k)}))
    out = backends.attend(q, k, v, pattern=frozen())
    torch.testing.assert_close(out, naive_attention(q, k, v, causal=True, window_size=(2, 0)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [None, 5, ["sdpa"], ""])
def test_a_name_that_is_none_is_refused(make_qkv, name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="There is no attention backend"):
        backends.attend(*make_qkv(2, 2), backend=name)


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_calls_are_served(sizes: tuple[int, int, int], causal: bool) -> None:
    batch, q_len, kv_len = sizes
    q, k, v = torch.randn(batch, q_len, 4, 16), *(torch.randn(batch, kv_len, 2, 16) for _ in "kv")
    out = backends.attend(q, k, v, causal=causal)
    assert out.shape == q.shape
    assert not out.any()
