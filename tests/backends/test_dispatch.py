"""One call for all: it selects, it runs, it counts."""

import threading

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Varlen
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import counts, sdpa
from vllm_teach.backends.hardware import Hardware, detect_hardware
from vllm_teach.backends.selection import select_backend
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
