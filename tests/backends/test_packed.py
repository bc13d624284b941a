"""Attention over an INT8 cache as it lies: bit for bit what the numbers that it stands for give."""

import pytest
import torch
from torch import Tensor

from vllm_teach.attention.layout import Paged
from vllm_teach.attention.patterns import BlockSparsePattern, LocalWindow
from vllm_teach.backends import cpu
from vllm_teach.backends.dispatch import Prepared
from vllm_teach.backends.packed import READERS, reads_packed
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_attention, cpu_build, cpu_library
from vllm_teach.kvcache.quantized_storage import pack, unpack

ISAS = tuple(cpu_build.ISA_FLAGS)
LENGTHS = [(1, 1), (1, 150), (1, 64), (3, 70), (40, 40), (25, 200)]  # (q_len, kv_len): decoded and prefilled sequences
CPU = torch.device("cpu")


def cache(
    head_dim: int, dtype: torch.dtype, block_size: int = 16, heads: tuple[int, int] = (6, 2)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Paged]:
    """q, packed k and v, the numbers that these stand for, and a layout whose blocks lie anywhere."""
    source = torch.Generator().manual_seed(head_dim)
    widths = [-(-kv_len // block_size) for _, kv_len in LENGTHS]
    num_blocks = sum(widths) + 3
    q = torch.randn(sum(q_len for q_len, _ in LENGTHS), heads[0], head_dim, generator=source).to(dtype)
    form = num_blocks, block_size, heads[1], head_dim
    k, v = (pack((3 * torch.randn(form, generator=source)).to(dtype)) for _ in range(2))
    order = torch.randperm(num_blocks, generator=source).to(torch.int32)
    table = torch.full((len(LENGTHS), max(widths)), -1, dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width], order = order[:width], order[width:]
    k[order.long()] = v[order.long()] = -1  # nobody's blocks: a scale of NaN
    starts = torch.tensor([0, *(q_len for q_len, _ in LENGTHS)]).cumsum(0).to(torch.int32)
    layout = Paged(starts, table, torch.tensor([kv_len for _, kv_len in LENGTHS], dtype=torch.int32))
    numbers = (unpack(each, torch.empty(form, dtype=dtype)) for each in (k, v))
    return q, k, v, *numbers, layout


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 7, 16, 40, 64])
def test_the_same_bits_as_from_the_numbers(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    if isa not in cpu_library.runnable_isas() or cpu_build.why_not("attention", isa) is not None:
        pytest.skip(f"{isa} cannot run or be built here")
    q, k, v, keys, values, layout = cache(head_dim, dtype)
    for arguments in ({"causal": True}, {"window_size": (30, 0)}):
        found = cpu.attention_forward(q, k, v, layout=layout, isa=isa, **arguments)
        wanted = cpu.attention_forward(q, keys, values, layout=layout, isa=isa, **arguments)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.isfinite().all()


@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (8, 2)])
def test_blocks_heads_and_masks(needs_kernel: None, block_size: int, heads: tuple[int, int]) -> None:
    sparse = BlockSparsePattern(torch.rand(13, 13, generator=torch.Generator().manual_seed(1)) < 0.5, 16)
    q, k, v, keys, values, layout = cache(24, torch.float32, block_size, heads)
    for arguments in (
        {"causal": True, "softcap": 5.0},
        {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.5, heads[0])},
        {"causal": True, "pattern": sparse},
        {"causal": True, "pattern": LocalWindow(9)},
    ):
        found = cpu.run(q, k, v, layout=layout, **arguments)
        assert torch.equal(found, cpu.run(q, keys, values, layout=layout, **arguments))


@pytest.fixture
def needs_kernel() -> None:
    if cpu.unavailable() is not None:
        pytest.skip("no compiler")


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_prepared_calls(needs_kernel: None, backend: str) -> None:
    """As a model's layers call it: the same blocks, other codes; and a cache of another form is refused."""
    q, k, v, keys, values, layout = cache(16, torch.float32)
    prepared = Prepared(q, k, v, backend=backend, layout=layout, causal=True)
    assert prepared.backend == "cpu"
    wanted = [cpu.run(q, a, b, layout=layout, causal=True) for a, b in ((keys, values), (values, keys))]
    assert torch.equal(prepared(q, k, v), wanted[0])
    assert torch.equal(prepared(q, v, k), wanted[1])
    with pytest.raises(InvalidArgumentError, match="this call was prepared for"):
        prepared(q, k[1:], v[1:])
    with pytest.raises(InvalidArgumentError, match=r"type='meta'.* this call was prepared for"):
        prepared(q, k.to("meta"), v)


def test_what_fits_no_packed_cache_is_refused() -> None:
    q, k, v, keys, _, layout = cache(16, torch.float32)
    for bad, named in (
        (
            (q, k[..., 4:], v),
            r"^k has dtype torch.int8 and shape \[.*, 16\]; .* int8 with 20 bytes in its last place\.$",
        ),
        ((q, k, v[..., 4:]), "^v has "),
        ((q, k, keys), "^v has dtype torch.float32"),
        ((q.bfloat16(), k, v), "^k has dtype torch.int8 .* packed for a q of torch.bfloat16 .* 18 bytes"),
    ):
        for call in (cpu.run, Prepared):
            with pytest.raises(InvalidArgumentError, match=named):
                call(*bad, layout=layout, causal=True)
    elsewhere, flat = k.to("meta"), torch.zeros(k.numel() + 1, dtype=torch.int8)
    for bad, named in (
        ((q, elsewhere, elsewhere), "^k is on meta and q on cpu; move one to the other"),
        ((q, k, elsewhere), "^v is on meta and q on cpu"),
        ((q, k, v.to_sparse()), "^v is of layout torch.sparse_coo"),
        ((q, flat[1:].view(k.shape), v), r"^k has strides .* starts at byte 1; .* at multiples of 4: copy it\."),
        ((q, k, torch.zeros(*k.shape[:-1], 21, dtype=torch.int8)[..., :20]), "^v has strides"),
        ((q, k.mT.contiguous().mT, v), "^k has strides"),
    ):
        for call in (cpu.run, Prepared):
            with pytest.raises(InvalidArgumentError, match=named):
                call(*bad, layout=layout, causal=True)
    for backend in ("sdpa", "naive"):
        with pytest.raises(InvalidArgumentError, match=f"^backend='{backend}' reads no packed cache: use cpu"):
            Prepared(q, k, v, backend=backend, layout=layout, causal=True)


def test_who_reads_packed_caches(needs_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert READERS == ("cpu",)
    assert reads_packed("auto", torch.float32, CPU)
    assert reads_packed("cpu", torch.bfloat16, CPU)
    assert not reads_packed("sdpa", torch.float32, CPU)
    assert not reads_packed("auto", torch.float64, CPU)
    assert not reads_packed("auto", torch.float32, torch.device("cuda"))
    monkeypatch.setattr(cpu_attention, "unavailable", lambda: "no compiler")
    assert not reads_packed("auto", torch.float32, CPU)


def test_a_kernel_that_cannot_be_built_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MissingDependencyError("the compiler is broken.")

    monkeypatch.setattr(cpu_attention, "unavailable", lambda: None)
    monkeypatch.setattr(cpu_attention, "load", fail)
    with pytest.warns(RuntimeWarning, match=r"read through copies\. the compiler is broken\."):
        assert not reads_packed("auto", torch.float32, CPU)
