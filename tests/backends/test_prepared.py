"""Plan once, run for each layer: the same numbers as separate calls, with the work that they share done once."""

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention import layout as layout_module
from vllm_teach.attention.layout import Layout, Paged, Varlen
from vllm_teach.attention.patterns import GlobalTokens, LocalWindow
from vllm_teach.backends import cpu, sdpa
from vllm_teach.backends.dispatch import Prepared, attend
from vllm_teach.backends.hardware import detect_hardware
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError

STARTS = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
PAGED = Paged(
    STARTS, torch.tensor([[5, 0, 2], [1, 3, 9], [4, 9, 9]], dtype=torch.int32), torch.tensor([11, 7, 2]).int()
)
VARLEN = Varlen(STARTS, torch.tensor([0, 11, 18, 20], dtype=torch.int32))
MASKS: dict[str, dict[str, object]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (4, 0)},
    "sinks": {"causal": True, "pattern": GlobalTokens(2) | LocalWindow(3)},
    "slopes": {"alibi_slopes": torch.rand(3, 4)},
}
USABLE = [name for name in ("naive", "tiled", "sdpa", "cpu", "auto") if name != "cpu" or cpu.unavailable() is None]


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    backends.reset_calls()


def tensors(layout: Layout | None, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each a part of a larger tensor, as a layer's are."""
    generator = torch.Generator().manual_seed(seed)
    q_size, kv_size = ((5, 4, 8), (20, 2, 8)) if layout is not None else ((3, 5, 4, 8), (3, 20, 2, 8))
    if isinstance(layout, Paged):
        kv_size = (6, 4, 2, 8)
    q, k, v = (torch.randn(2, *size, generator=generator) for size in (q_size, kv_size, kv_size))
    return q[1], k[0], v[1]


@pytest.mark.parametrize("backend", USABLE)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", [None, VARLEN, PAGED], ids=["dense", "varlen", "paged"])
def test_each_call_equals_attend(backend: str, mask: str, layout: Layout | None) -> None:
    prepared = Prepared(*tensors(layout, 0), backend=backend, layout=layout, **MASKS[mask])
    for seed in range(3):
        q, k, v = tensors(layout, seed)
        want = attend(q, k, v, backend="naive", layout=layout, **MASKS[mask])
        torch.testing.assert_close(prepared(q, k, v), want, rtol=0, atol=1e-5)
    assert backends.calls()[prepared.backend].calls == 3 * (1 if prepared.backend != "naive" else 2)


@pytest.mark.parametrize("backend", USABLE)
def test_the_layout_is_read_once(monkeypatch, backend: str) -> None:
    reads = []
    original = layout_module._read_table
    monkeypatch.setattr(layout_module, "_read_table", lambda *args: reads.append(1) or original(*args))
    prepared = Prepared(*tensors(PAGED, 0), backend=backend, layout=PAGED, causal=True)
    for seed in range(4):
        prepared(*tensors(PAGED, seed))
    assert len(reads) == 1


def test_tensors_unlike_the_first_are_refused() -> None:
    if cpu.unavailable() is not None:
        return
    q, k, v = tensors(PAGED, 0)
    prepared = Prepared(q, k, v, backend="cpu", layout=PAGED)
    prepared(q, k, v)
    strided = torch.zeros(6, 4, 2, 16)[..., :8]
    for other in ((q.half(), k.half(), v.half()), (q, k[:5], v), (q, strided, strided)):
        with pytest.raises(InvalidArgumentError, match="this call was prepared for"):
            prepared(*other)


def test_what_no_backend_can_serve_is_refused_when_prepared_or_called() -> None:
    q, k, v = tensors(PAGED, 0)
    with pytest.raises(InvalidArgumentError, match="no attention backend 'fast'"):
        Prepared(q, k, v, backend="fast", layout=PAGED)
    with pytest.raises(InvalidArgumentError, match="kv_lens holds 99"):
        Prepared(q, k, v, layout=Paged(STARTS, PAGED.block_table, torch.tensor([99, 1, 1]).int()))
    with pytest.raises(InvalidArgumentError, match="sdpa has no softcap"):
        Prepared(q, k, v, backend="sdpa", softcap=2.0, layout=PAGED)(q, k, v)


def test_a_backend_that_fails_at_its_first_call_is_replaced(monkeypatch) -> None:
    q, k, v = tensors(None, 0)
    prepared = Prepared(q, k, v, causal=True)
    assert prepared.backend == "sdpa"

    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        raise MissingDependencyError("It does not build.")

    monkeypatch.setattr(sdpa, "run", fail)
    with pytest.raises(MissingDependencyError):
        Prepared(q, k, v, backend="sdpa")(q, k, v)  # who asked for it gets no other
    monkeypatch.setattr(sdpa, "unavailable", lambda: "It does not build.")
    with pytest.warns(RuntimeWarning, match=r"The backend sdpa failed, .* serves instead"):
        out = prepared(q, k, v)
    torch.testing.assert_close(out, attend(q, k, v, backend="naive", causal=True), rtol=0, atol=1e-5)
    assert prepared.backend != "sdpa"
    torch.testing.assert_close(prepared(q, k, v), out)
    detect_hardware.cache_clear()
