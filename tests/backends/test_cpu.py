"""The C++ backend: the conformance table, and what the table does not ask.

Without a compiler there is no kernel; then every call must say so. That is tested instead, not skipped.
"""

from collections.abc import Callable

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Paged, Varlen
from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow, Strided
from vllm_teach.attention.reference import naive_attention
from vllm_teach.backends import cpu
from vllm_teach.backends.conformance import ROWS, Row, check_forward
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Draw = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def kernel_or_reason() -> None:
    """Without a compiler: check that a call names the reason, and end the test as passed."""
    reason = cpu.unavailable()
    if reason is not None:
        q = torch.zeros(1, 1, 1, 8)
        with pytest.raises(MissingDependencyError) as caught:
            cpu.run(q, q, q)
        assert str(caught.value) == reason
        assert "sdpa and tiled need no compiler" in reason


def has_kernel() -> bool:
    return cpu.unavailable() is None


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: object) -> None:
    """Compare out and lse with naive in float64, by FlashAttention's rule."""
    exact = naive_attention(q.double(), k.double(), v.double(), return_lse=True, **arguments)
    plain = naive_attention(q, k, v, return_lse=True, **arguments)
    ours = cpu.attention_forward(q, k, v, **arguments)
    assert ours[0].dtype == q.dtype
    assert ours[1].dtype == torch.float32
    for want, rough, got in zip(exact, plain, ours, strict=True):
        assert got.shape == want.shape
        assert torch.equal(got.isinf(), want.isinf())
        finite = want.isfinite()
        limit = 2 * (rough.double() - want)[finite].abs().max().nan_to_num(0) + 1e-5 if finite.any() else 0
        assert ((got.double() - want)[finite].abs() <= limit).all()


@pytest.mark.parametrize("row", [row for row in ROWS if cpu.supports(row.spec()) is None], ids=lambda row: row.name)
def test_forward(row: Row) -> None:
    if has_kernel():
        check_forward(cpu.run, row)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 16, 31, 64, 72, 96, 192, 256, 300])
def test_every_head_size(head_dim: int) -> None:
    if not has_kernel():
        return
    for dtype in DTYPES:
        for q_len in (1, 19):  # few rows, and more
            q, k, v = (torch.randn(1, n, h, head_dim).to(dtype) for n, h in ((q_len, 2), (70, 1), (70, 1)))
            check(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [0, 1, 63, 64, 65, 129, 1111])
def test_lengths_and_masks(kv_len: int, dtype: torch.dtype) -> None:
    if not has_kernel():
        return
    masks: tuple[dict[str, object], ...] = (
        {},
        {"causal": True},
        {"window_size": (40, 3)},
        {"pattern": GlobalTokens(4) | LocalWindow(9)},
        {"pattern": Causal() & Strided(5), "softcap": 3.0},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0]), "causal": True},
    )
    for q_len in (1, 4, 66, 200):
        q, k, v = (torch.randn(1, n, h, 16).to(dtype) for n, h in ((q_len, 3), (kv_len, 1), (kv_len, 1)))
        for mask in masks:
            check(q, k, v, **mask)


@pytest.mark.parametrize("threads", [1, 2, 5, 32])
def test_any_number_of_threads(threads: int) -> None:
    """Few items and long keys: with several threads the keys are split, and the parts merged."""
    if not has_kernel():
        return
    torch.set_num_threads(threads)  # the fixture of this folder sets it back
    for q_len, kv_len in ((1, 5000), (70, 3000), (300, 3000)):
        q, k, v = (torch.randn(1, n, h, 32) for n, h in ((q_len, 2), (kv_len, 1), (kv_len, 1)))
        for mask in ({"causal": True}, {"window_size": (2500, 0)}, {"pattern": GlobalTokens(8) | LocalWindow(70)}):
            check(q, k, v, **mask)


def test_strides_of_every_kind() -> None:
    if not has_kernel():
        return
    contiguous = torch.randn(2, 3, 50, 40)
    q = contiguous.transpose(1, 2)  # heads before tokens in memory
    k = torch.randn(2, 80, 2, 3, 40)[:, ::2, 1]  # every other token of one of two
    v = torch.randn(2, 40, 40, 3).transpose(2, 3)  # the numbers of a head do not follow one another
    check(q, k, v, causal=True)
    shared = torch.randn(1, 1, 1, 40).expand(2, 40, 3, 40)  # all strides 0
    check(q, shared, shared, causal=True)


def test_memory_that_does_not_hold_the_numbers() -> None:
    if not has_kernel():
        return
    k, v = torch.randn(2, 1, 9, 2, 1)
    mirrored = torch.randn(1, 9, 2, 1, dtype=torch.complex64).conj().imag
    assert mirrored.is_neg()  # its memory holds the negated numbers
    check(mirrored, k, v, causal=True)
    check(k, mirrored, mirrored, alibi_slopes=mirrored[0, 0, :, 0].abs())
    nothing = torch._efficientzerotensor(1, 9, 2, 1)
    assert nothing.data_ptr() == 0
    assert torch.equal(cpu.run(k, k, nothing), torch.zeros(1, 9, 2, 1))


def test_memory_at_odd_addresses() -> None:
    if not has_kernel():
        return
    for dtype in DTYPES:
        numbers = torch.randn(2, 70, 2, 24).to(dtype)
        memory = bytearray(numbers.numel() * numbers.element_size() + 1)
        shifted = torch.frombuffer(memory, dtype=dtype, offset=1).view(2, 70, 2, 24)
        shifted.copy_(numbers)
        for rows in (1, 70):
            check(shifted[:, :rows], shifted, shifted, causal=True)


def test_strides_in_layouts() -> None:
    if not has_kernel():
        return
    starts = torch.tensor([0, 3, 3, 40], dtype=torch.int32)
    q = torch.randn(40, 8, 2, 16)[:, 5]
    cache = torch.randn(20, 2, 5, 1, 16)  # keys and values of a block beside each other
    table = torch.randperm(20, dtype=torch.int32).view(4, 5)[:3, ::2]  # every other column
    lens = torch.tensor([15, 7, 11], dtype=torch.int32)
    out, lse = cpu.attention_forward(
        q, cache[:, 0], cache[:, 1], layout=Paged(starts, table, lens), causal=True, window_size=(6, 0)
    )
    assert lse.shape == (2, 40)
    for i in range(3):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        keys, values = (cache[table[i].long(), side].flatten(0, 1)[None, : int(lens[i])] for side in (0, 1))
        want = naive_attention(q[rows][None], keys, values, causal=True, window_size=(6, 0), return_lse=True)
        torch.testing.assert_close(out[rows], want[0][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[:, rows], want[1][0], atol=1e-5, rtol=0)


def test_lse_of_a_varlen_call() -> None:
    if not has_kernel():
        return
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    _, lse = cpu.attention_forward(q, k, v, layout=Varlen(starts, starts), causal=True)
    want = naive_attention(q[None, 5:], k[None, 5:], v[None, 5:], causal=True, return_lse=True)[1]
    torch.testing.assert_close(lse[:, 5:], want[0], atol=1e-5, rtol=0)


def test_nan_reaches_those_who_see_it_and_no_one_else() -> None:
    if not has_kernel():
        return
    for rows in (1, 30):  # few rows, and more
        q, k, v = (torch.randn(1, 200, 1, 16) for _ in range(3))
        k[:, 150] = float("nan")
        out = cpu.run(q[:, 200 - rows :], k, v, causal=True)
        assert out.isnan().all()
        assert cpu.run(q[:, :150], k[:, :150], v[:, :150], causal=True).isfinite().all()
        seen = cpu.run(q, k, v, causal=True).isnan().all(dim=-1).flatten()
        assert not seen[:150].any()
        assert seen[150:].all()


def test_cache_tails_are_not_read() -> None:
    """Behind a sequence's last key: NaN in the slots, and block numbers that do not exist."""
    if not has_kernel():
        return
    q = torch.randn(9, 2, 16)
    k, v = torch.full((2, 4, 3, 1, 16), float("nan"))
    starts = torch.tensor([0, 1, 9], dtype=torch.int32)
    table = torch.tensor([[3, 1 << 30, -7], [0, 2, -1]], dtype=torch.int32)
    layout = Paged(starts, table, torch.tensor([2, 5], dtype=torch.int32))
    for cache in (k, v):
        cache[3, :2], cache[0], cache[2, :2] = torch.randn(2, 1, 16), torch.randn(3, 1, 16), torch.randn(2, 1, 16)
    out = cpu.run(q, k, v, layout=layout, causal=True)
    want = naive_attention(q[None, :1], k[None, 3, :2], v[None, 3, :2], causal=True)[0]
    torch.testing.assert_close(out[:1], want, atol=1e-5, rtol=0)
    keys, values = (torch.cat((cache[0], cache[2, :2]))[None] for cache in (k, v))
    want = naive_attention(q[None, 1:], keys, values, causal=True)[0]
    torch.testing.assert_close(out[1:], want, atol=1e-5, rtol=0)


def test_large_scores_and_windows() -> None:
    if not has_kernel():
        return
    q, k, v = (torch.randn(1, 90, 2, 32) for _ in range(3))
    check(q * 5, k * 5, v, causal=True)  # one key takes nearly all
    check(q, k, v, window_size=(2**62, 0))
    check(q, k, v, scale=0.0)
    check(q * 1e18, k * 1e18, v, softcap=20.0)
    check(q * 0, k, v, scale=1e30, softcap=1e-30)
    check(q, k, v, softcap=2e38)
    check(q * 1e-38, k, v, scale=2e38)
    nearest = torch.einsum("bqhd,bkhd->bhqk", q, k).argmax(dim=-1)[0, 1]
    out = cpu.run(q * 1e6, k * 1e6, v)  # scores of 1e13, of which only one counts
    torch.testing.assert_close(out[0, :, 1], v[0, nearest, 1], rtol=1e-6, atol=0)


def test_more_keys_than_an_int32_counts() -> None:
    """A window at the end of 2^31 + 70 keys, which share the memory of one."""
    if not has_kernel():
        return
    q, k = torch.randn(2, 1, 1, 1, 8)
    many = k.expand(1, 2**31 + 70, 1, 8)
    out, lse = cpu.attention_forward(q, many, many, window_size=(99, 0))
    torch.testing.assert_close(out, k, atol=1e-5, rtol=0)
    want = naive_attention(q, many[:, :100], many[:, :100], return_lse=True)[1]
    torch.testing.assert_close(lse, want, atol=1e-5, rtol=0)


def test_inference_mode_and_another_default_device() -> None:
    if not has_kernel():
        return
    with torch.inference_mode():
        q = torch.randn(1, 5, 2, 8)
        expected = naive_attention(q, q, q)
    with torch.inference_mode(), torch.device("meta"):
        out = cpu.run(q, q, q)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "arguments", "words"),
    [
        (torch.float64, {}, "float64"),
        (torch.float32, {"dropout_p": 0.1}, "no dropout"),
        (torch.float32, {"requires_grad": True}, "no backward pass"),
    ],
)
def test_what_it_cannot_do_is_refused(dtype: torch.dtype, arguments: dict[str, object], words: str) -> None:
    q = torch.zeros(1, 3, 1, 8, dtype=dtype, requires_grad=bool(arguments.pop("requires_grad", False)))
    with pytest.raises(InvalidArgumentError, match=words):
        cpu.run(q, q, q, **arguments)


def test_the_path_of_this_machine_is_chosen_and_named() -> None:
    """With AVX2 and a compiler the kernel serves; else PyTorch does, and the selection says which of them lacks."""
    backends.detect_hardware.cache_clear()
    selection = backends.select_backend(backends.AttentionSpec(1, 4096, 4096, 8, 8, 64, torch.float32))
    capability = torch.backends.cpu.get_cpu_capability()
    machines = {"AVX2": "CPU with AVX2", "AVX512": "CPU with AVX2 and AVX-512"}
    assert selection.machine == machines.get(capability, "CPU without vector instructions that count")
    reasons = {"AVX2": "our kernel uses AVX2", "AVX512": "our kernel uses AVX-512"}
    assert reasons.get(capability, "without AVX2 our kernel is no faster than PyTorch's") in selection.reason
    assert selection.choice == ("cpu" if capability in reasons and has_kernel() else "sdpa")
    if not has_kernel():
        assert selection.others["cpu"] == cpu.unavailable()
        assert "has to be built, and" in selection.others["cpu"]


def test_without_a_compiler_another_backend_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("VLLM_TEACH_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    backends.detect_hardware.cache_clear()
    try:
        spec = backends.AttentionSpec(1, 4096, 4096, 8, 8, 64, torch.float32)
        selection = backends.select_backend(spec)
    finally:
        backends.detect_hardware.cache_clear()
    assert selection.choice == "sdpa"
    assert "no C++ compiler 'c++' on the PATH" in selection.others["cpu"]
