"""LayerNorm and RMSNorm against float64: every instruction set, dtype and kind of row, and who computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_teach import kernels
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels import cpu_build, cpu_library, cpu_norms, norm_paths, norms

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = tuple(cpu_build.ISA_FLAGS)
KINDS = norms.KINDS
RUNNABLE = [isa for isa in ISAS if isa in cpu_library.runnable_isas() and cpu_build.why_not("norms", isa) is None]
needs_kernel = pytest.mark.skipif(not RUNNABLE, reason="There is no compiler here for the CPU kernel.")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def exact(kind: str, x: Tensor, eps: float) -> Tensor:
    """Return the normalised rows, float64, before weight and bias."""
    x = x.double()
    if kind == "layer_norm":
        x = x - x.mean(dim=-1, keepdim=True)
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest error that rounding `x` to `dtype` makes."""
    info = torch.finfo(dtype)
    return x.abs().clamp(min=info.tiny) * info.eps / 2


def check(kind: str, found: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> None:
    """Fail unless `found` is right up to its own rounding and a few of float32's.

    An RMSNorm is rounded twice: the normalised number, and its product with the weight.
    """
    n = exact(kind, x, eps)
    w = torch.ones(()) if weight is None else weight.double()
    b = torch.zeros(()) if bias is None else bias.double()
    expected = n * w + b
    allowed = half_step(expected, x.dtype) * 1.01 + 1e-6 * ((1 + n.abs()) * w.abs() + b.abs())
    if kind == "rms_norm" and weight is not None:
        allowed = allowed + half_step(n, x.dtype) * w.abs() * 1.01
    error = (found.double() - expected).abs()
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.2f} times what is allowed"


def on_cpu(isa: str, kind: str, x: Tensor, *parameters: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """Return the norm as the C++ kernel for `isa` computes it; skip where it cannot run."""
    if isa not in RUNNABLE:
        pytest.skip(f"This machine cannot run or build {isa}.")
    return cpu_norms.norm(kind, x, residual, *parameters, 1e-5, isa)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_size(isa: str, dtype: torch.dtype, kind: str) -> None:
    for size in (1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 576, 1000, 2048, 8192, 8193):
        x = draw(3, size, dtype=dtype, seed=size, scale=3) + 0.5
        weight, bias = draw(size, dtype=dtype, seed=1), draw(size, dtype=dtype, seed=2)
        if kind == "rms_norm":
            bias = None
        check(kind, on_cpu(isa, kind, x, weight, bias), x, weight, bias)
        check(kind, on_cpu(isa, kind, x, None, None), x, None, None)


EXTREME = {
    "constant": torch.full((577,), 3.7),
    "constant and huge": torch.full((577,), -1e30),
    "huge": draw(577, scale=1e30),
    "huge and far from 0": draw(577, scale=1e28) + 1e30,
    "tiny": draw(577, scale=1e-30),
    "all 0": torch.zeros(577),
    "far from 0": draw(577) + 1e4,
    "nearly constant": 1000 + torch.arange(577) % 2 * 1e-4,
    "one that stands out": torch.cat((draw(576), torch.tensor([1e6]))),
    "one huge": torch.cat((torch.tensor([3e38]), draw(576))),
    "both ends": torch.cat((torch.full((288,), 1.5e38), torch.full((289,), -1.5e38))),
    "further apart than float32 counts": torch.cat((torch.full((576,), 3.4e38), torch.tensor([-3.4e38]))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", EXTREME.values(), ids=EXTREME.keys())
@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_float32_cannot_sum_up(isa: str, row: Tensor, kind: str) -> None:
    x = torch.stack((draw(577), row, draw(577)))  # and its neighbours keep out of it
    weight = draw(577, seed=1)
    check(kind, on_cpu(isa, kind, x, weight, None), x, weight, None)


@needs_kernel
@pytest.mark.parametrize("value", [0.1, 3.7, -65504.1, 1.7e8, -1.3e12, 1e30])
def test_a_constant_row_becomes_the_bias_exactly(value: float) -> None:
    x, bias = torch.full((2, 1000), value), draw(1000)
    assert torch.equal(norms.layer_norm(x, draw(1000, seed=1), bias), bias.expand(2, -1))


@pytest.mark.parametrize("size", [577, 2048, 4096, 8192, 20_000])
@pytest.mark.parametrize("isa", ISAS)
def test_a_constant_row_is_summed_up_as_exactly_as_by_pytorch(isa: str, size: int) -> None:
    """Equal terms are all rounded to one side: 64 sums of them once drifted up to 8 epsilons apart at 8,192."""
    constants = torch.linspace(0.1, 9.7, 200)
    x = constants[:, None].expand(-1, size).contiguous()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    plain = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    ours = on_cpu(isa, "rms_norm", x, None, None)
    worst, theirs = ((each.double() - exact).abs().max().item() for each in (ours, plain))
    assert worst <= 2 * theirs, f"{worst / torch.finfo(torch.float32).eps:.1f} epsilons"


@needs_kernel
@pytest.mark.parametrize("mean", [0.05, 567e3, 6.05e7, 1e20])
def test_rows_that_differ_in_their_last_digits(mean: float) -> None:
    noise = torch.randn(4, 8992, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (mean * (1 + noise * 1.5e-8)).float()
    check("layer_norm", norms.layer_norm(x, eps=0.0), x, None, None, eps=0.0)


@needs_kernel
@pytest.mark.parametrize("eps", [0.0, 1e-40, 10.0])
def test_every_eps(eps: float) -> None:
    for scale in (1e-25, 1.0, 1e25):
        x = draw(4, 600, scale=scale)
        check("layer_norm", norms.layer_norm(x, eps=eps), x, None, None, eps)
        check("rms_norm", norms.rms_norm(x, eps=eps), x, None, None, eps)


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_row(kind: str) -> None:
    x = draw(3, 100)
    x[0, 5], x[2, 7] = torch.nan, torch.inf
    found = getattr(norms, kind)(x, eps=1e-5)
    assert found[0].isnan().all()
    assert not found[2].isfinite().all()
    check(kind, found[1:2], x[1:2], None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_rms_norm_rounds_before_the_weight(isa: str, dtype: torch.dtype) -> None:
    """As transformers' rule says it, but where float32 itself cannot tell which of two neighbours is nearer."""
    x, weight = draw(64, 576, dtype=dtype, scale=2), draw(576, dtype=dtype, seed=1)
    n = exact("rms_norm", x, 1e-5)
    doubt = (n * (1 - 1e-6)).to(dtype) != (n * (1 + 1e-6)).to(dtype)
    found = on_cpu(isa, "rms_norm", x, weight, None)
    if dtype == torch.float32:
        torch.testing.assert_close(found, n.float() * weight, rtol=3e-7, atol=0)
    else:
        assert torch.equal(found[~doubt], (n.to(dtype) * weight)[~doubt])
        assert doubt.float().mean() < 0.01


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_sum_is_the_sum(kind: str, dtype: torch.dtype) -> None:
    x, residual = draw(5, 577, dtype=dtype, scale=3), draw(5, 577, dtype=dtype, seed=1)
    before = x.clone(), residual.clone()
    weight = draw(577, dtype=dtype, seed=2)
    normalised, total = getattr(norms, f"add_{kind}")(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(normalised, getattr(norms, kind)(x + residual, weight))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_what_is_written_past_the_caches_is_the_same(isa: str, dtype: torch.dtype) -> None:
    """As from 8 MiB on; a single row is not."""
    size = 8192
    x, residual = draw(520, size, dtype=dtype), draw(520, size, dtype=dtype, seed=1)
    weight, bias = draw(size, dtype=dtype, seed=2), draw(size, dtype=dtype, seed=3)
    if isa not in RUNNABLE:
        pytest.skip(f"This machine cannot run or build {isa}.")
    for parameters in (("layer_norm", weight, bias), ("rms_norm", weight, None)):
        kind, *rest = parameters
        for added in (None, residual):
            whole, total = cpu_norms.norm(kind, x, added, *rest, 1e-5, isa)
            for row in (0, 259, 519):
                one = slice(row, row + 1)
                alone = cpu_norms.norm(kind, x[one], None if added is None else added[one], *rest, 1e-5, isa)
                assert torch.equal(whole[one], alone[0])
                assert torch.equal(total[one], alone[1])
            assert torch.equal(total, x if added is None else x + residual)


def layouts() -> dict[str, Tensor]:
    wide = draw(6, 4, 200)
    return {
        "rows apart": wide[:, 0, :100],
        "every other number": wide[..., ::2],
        "heads cut from a wider row": wide[..., 64:128],
        "transposed": wide.transpose(0, 2),
        "one row for all": draw(1, 100).expand(7, 100),
        "one vector": wide[0, 0],
        "no row": wide[:0],
        "backwards in sign": torch.view_as_complex(draw(4, 32, 2)).conj().imag,
    }


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", layouts())
def test_every_layout(name: str, kind: str) -> None:
    x = layouts()[name]
    found = getattr(norms, kind)(x, eps=1e-5)
    check(kind, found, x, None, None)
    assert found.is_contiguous()
    other = draw(*x.shape, seed=3)
    for pair in ((x, other), (other, x)):
        normalised, total = getattr(norms, f"add_{kind}")(*pair, eps=1e-5)
        assert torch.equal(total, x + other)
        check(kind, normalised, x + other, None, None)


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(kind: str) -> None:
    x = draw(300, 1000)
    norm = getattr(norms, kind)
    whole = norm(x)
    assert torch.equal(whole, torch.cat([norm(row[None]) for row in x]))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(norm(x), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_the_kernel(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_norms, "loads", lambda: False)
    monkeypatch.setattr(cpu_norms, "unavailable", lambda: "The compiler is on holiday.")
    x, residual, weight = draw(5, 100, dtype=dtype), draw(5, 100, dtype=dtype, seed=1), draw(100, dtype=dtype, seed=2)
    assert norms.explain(kind, x, weight).name == "plain"
    check(kind, getattr(norms, kind)(x, weight, eps=1e-5), x, weight, None)
    normalised, total = getattr(norms, f"add_{kind}")(x, residual, weight, eps=1e-5)
    assert torch.equal(total, x + residual)
    check(kind, normalised, x + residual, weight, None)


@needs_kernel
def test_explain() -> None:
    x = draw(2, 8)
    assert str(norms.explain("rms_norm", x)).startswith("cpu: ")
    reasons = {
        "x has dtype torch.float64": norms.explain("layer_norm", x.double()),
        "another tensor is torch.float32": norms.explain("layer_norm", x.half(), draw(8)),
        "a gradient is asked for": norms.explain("rms_norm", x, draw(8).requires_grad_()),
        "no kernel for tensors on meta": norms.explain("rms_norm", x.to("meta")),
    }
    for words, path in reasons.items():
        assert path.name == "plain"
        assert words in path.reason
    assert norms.explain("layer_norm", x.requires_grad_()).name == "cpu"  # it has a backward pass of its own


def test_explain_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "load_library", lambda *_: pytest.fail("was loaded"))
    norms.explain("rms_norm", draw(2, 8))


def test_mixed_dtypes_are_left_to_pytorch() -> None:
    x, weight = draw(3, 64, dtype=torch.bfloat16), draw(64)
    torch.testing.assert_close(norms.layer_norm(x, weight), torch.layer_norm(x, [64], weight))
    assert norms.rms_norm(x, weight).dtype == torch.float32  # as a product of the two is
    normalised, total = norms.add_rms_norm(x, draw(3, 64, seed=1))
    assert normalised.dtype == total.dtype == torch.float32  # as the sum of the two is


@pytest.mark.parametrize(
    ("dtype", "parameter", "hint"),
    [
        (torch.float32, torch.bfloat16, "give torch.float32, as x has torch.float32"),
        (torch.float64, torch.float32, "give torch.float64, as x has torch.float64"),
        (torch.float16, torch.bfloat16, "give torch.float16 or torch.float32, as x has torch.float16"),
    ],
)
def test_dtypes_that_make_no_layer_norm_are_refused(dtype: torch.dtype, parameter: torch.dtype, hint: str) -> None:
    x, other = draw(3, 64, dtype=dtype), draw(64, dtype=parameter)
    with pytest.raises(InvalidArgumentError, match=f"weight has dtype {parameter}; {hint}"):
        norms.layer_norm(x, other)
    with pytest.raises(InvalidArgumentError, match=f"bias has dtype {parameter}; {hint}"):
        norms.add_layer_norm(x, x, None, other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": torch.tensor(1.0)}, r"x has shape \[\]"),
        ({"x": torch.zeros(3, 0)}, r"x has shape \[3, 0\]"),
        ({"x": torch.zeros(3, 4, dtype=torch.int64)}, "x has dtype torch.int64"),
        ({"x": torch.zeros(3, 4), "weight": torch.ones(3)}, r"weight has shape \[3\]; give \[4\]"),
        ({"x": torch.zeros(3, 4), "bias": torch.ones(1, 4)}, r"bias has shape \[1, 4\]; give \[4\]"),
        ({"x": torch.zeros(3, 4), "eps": -1.0}, "eps is -1.0"),
        ({"x": torch.zeros(3, 4), "eps": float("nan")}, "eps is nan"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Tensor], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        norms.layer_norm(**arguments)
    if "bias" not in arguments:
        with pytest.raises(InvalidArgumentError, match=words):
            norms.rms_norm(**arguments)


def test_a_residual_of_another_shape() -> None:
    with pytest.raises(InvalidArgumentError, match=r"residual has shape \[4\]; give x's, \[3, 4\]"):
        norms.add_rms_norm(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(InvalidArgumentError, match="kind is 'batch_norm'; choose one of layer_norm, rms_norm"):
        norms.explain("batch_norm", torch.zeros(3, 4))


def test_the_structure_is_that_of_the_header() -> None:
    """Field names in order: ctypes and the compiler lay the same fields out in the same way."""
    body = kernels.source("cpu/norms/call.h").split("struct NormCall {")[1].split("};")[0]
    code = [line.split("//")[0].strip() for line in body.splitlines()]
    found = [word.split()[-1].strip("*") for line in code for word in line.rstrip(";").split(",") if word.strip()]
    assert found == [name for name, *_ in cpu_norms.NormCall._fields_]


def test_a_path_is_run_as_chosen() -> None:
    x = draw(4, 64)
    plain = norm_paths.NormPath("plain", "for comparison")
    for kind in KINDS:
        found, same = norm_paths.run(plain, kind, x, None, None, None, 1e-5)
        assert same is x
        check(kind, found, x, None, None)


class _ElsewhereTensor(Tensor):
    """A tensor of a kind that computes for itself."""


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_whose_numbers_lie_elsewhere(kind: str) -> None:
    """A kernel would read at the address 0 of the zeros that PyTorch puts off, and past what a subclass does."""
    x, zeros = draw(3, 64), torch._efficientzerotensor(3, 64)
    assert torch.equal(getattr(norms, kind)(zeros), torch.zeros(3, 64))
    assert torch.equal(getattr(norms, f"add_{kind}")(x, zeros)[1], x)
    for other in (zeros, x.as_subclass(_ElsewhereTensor)):
        assert "without numbers in memory" in norms.explain(kind, other).reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": torch.zeros(3, 4).to_sparse()}, r"x is of the kind torch\.sparse_coo"),
        (
            {"x": torch.zeros(3, 4), "residual": torch.zeros(3, 4).to_mkldnn()},
            r"residual is of the kind torch",
        ),
        ({"x": torch.nested.as_nested_tensor([torch.zeros(4)])}, "x is of the kind"),
        ({"x": [1.0]}, "x is of the kind list"),
        ({"x": torch.zeros(3, 4).to(torch.float8_e4m3fn)}, "of 16 bits at least"),
        ({"x": torch.zeros(3, 4), "weight": torch.ones(4, device="meta")}, "weight is torch.float32 on meta"),
        ({"x": torch.zeros(3, 4), "residual": torch.ones(3, 4, device="meta")}, "residual is torch.float32 on meta"),
        ({"x": torch.zeros(3, 4), "weight": torch.ones(4) + 0j}, "weight is torch.complex64"),
        ({"x": torch.zeros(3, 4), "eps": None}, "eps is None"),
        ({"x": torch.zeros(3, 4), "eps": 10**400}, "eps is 1000"),
        ({"x": torch.zeros(3, 4), "eps": float("inf")}, "eps is inf"),
    ],
)
def test_what_no_norm_can_take(kind: str, arguments: dict[str, object], words: str) -> None:
    norm = getattr(norms, f"add_{kind}" if "residual" in arguments else kind)
    with pytest.raises(InvalidArgumentError, match=words):
        norm(**arguments)
