"""Products with quantised weights: exact where numbers are whole, close to float64 elsewhere, row by row the same."""

import copy
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from vllm_teach import kernels
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_build, cpu_library, packed_weight, quantized_matmul
from vllm_teach.kernels.quantized_matmul import PackedWeight, gated_matmul, matmul, pack, rows, unpack
from vllm_teach.performance.memory import peak_memory

PLAIN = "plain PyTorch"
PATHS = (*cpu_build.ISA_FLAGS, PLAIN)
BITS = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=PATHS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What to pass on as `isa`: each instruction set, and None without a compiler."""
    if request.param == PLAIN:
        monkeypatch.setattr(quantized_matmul, "_function", lambda bits, isa: None)
        return None
    if request.param not in cpu_library.runnable_isas():
        pytest.skip(f"this processor has no {request.param}")
    if (reason := cpu_build.why_not("matmul", request.param)) is not None:
        pytest.skip(reason)
    return request.param


def draw(out: int, size: int, group: int, bits: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and zeros over the whole range, 0 and 2^bits - 1 among them; scales are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (out, size), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (out, size // group), generator=generator, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-3, 3, zeros.shape, generator=generator)
    return codes, scales.half(), zeros


def whole_numbers(tokens: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, (tokens, size), generator=torch.Generator().manual_seed(tokens)).to(dtype)


def dense(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None = None) -> Tensor:
    """The matrix in float64, column by column."""
    size, groups = codes.shape[1], scales.shape[1]
    columns = []
    for i in range(size):
        group = i // (size // groups) if group_of is None else int(group_of[i])
        columns.append((codes[:, i].double() - zeros[:, group].double()) * scales[:, group].double())
    return torch.stack(columns, dim=1)


def shuffled_groups(size: int, groups: int) -> Tensor:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    return (torch.arange(size) // (size // groups))[order].int()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("out", "size", "group"), [(1, 8, 8), (16, 24, 8), (17, 96, 24), (40, 64, 64), (64, 576, 64)])
def test_unpack_gives_back_what_was_packed(out: int, size: int, group: int, bits: int) -> None:
    weight = draw(out, size, group, bits)
    for group_of in (None, shuffled_groups(size, size // group)):
        packed = pack(*weight, bits, group_of)
        found = unpack(packed)
        assert all(torch.equal(mine, given) for mine, given in zip(found, weight, strict=False))
        assert found[3] == bits
        if size == group or group_of is None:
            assert found[4] is None
        else:
            assert torch.equal(found[4], group_of)
        every = torch.arange(out).flip(0)
        assert torch.equal(rows(packed, every), dense(*weight, group_of).float()[every])


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(2, torch.bfloat16), (3, torch.float32), *((bits, dtype) for bits in (4, 8) for dtype in DTYPES)],
)
def test_whole_numbers_give_the_exact_product(bits: int, dtype: torch.dtype, isa: str | None) -> None:
    """Nothing is rounded on the way, so every product must come out to the last bit: all sizes of blocks and groups."""
    for out, size, group in ((1, 8, 8), (15, 48, 24), (33, 64, 16), (100, 192, 64), (192, 96, 96)):
        weight = draw(out, size, group, bits)
        group_of = shuffled_groups(size, size // group) if out == 33 else None
        packed, matrix = pack(*weight, bits, group_of), dense(*weight, group_of)
        bias = torch.arange(out).float() if out % 2 else None
        for tokens in (1, 2, 3, 4, 5, 7, 10, 16, 23, 24, 25, 61):
            x = whole_numbers(tokens, size, dtype)
            expected = x.double() @ matrix.T + (0 if bias is None else bias.double())
            assert torch.equal(matmul(x, packed, bias, torch.float32, isa=isa).double(), expected), (out, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_error_against_float64(bits: int, dtype: torch.dtype, isa: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    codes, _, zeros = draw(192, 576, 64, bits)
    scales = torch.rand(zeros.shape, generator=generator).add(0.01).mul(0.02).half()
    packed, matrix = pack(codes, scales, zeros, bits), dense(codes, scales, zeros)
    middle = 1 << bits - 1
    size_of_terms = dense(codes, scales, torch.full_like(zeros, middle)).abs()  # what is added up, and the zeros' part
    size_of_terms += dense(zeros.repeat_interleave(64, dim=1), scales, torch.full_like(zeros, middle)).abs()
    for tokens in (1, 9, 40):
        x = torch.randn(tokens, 576, generator=generator).to(dtype)
        x[:, 5] *= 300  # an outlier channel
        expected = x.double() @ matrix.T
        limit = x.double().abs() @ size_of_terms.T * 2**-18
        for out_dtype in (None, torch.float32, torch.bfloat16, torch.float16):
            found = matmul(x, packed, out_dtype=out_dtype, isa=isa)
            assert found.dtype == (out_dtype or dtype)
            rounding = expected.abs() * torch.finfo(found.dtype).eps / 2
            assert ((found.double() - expected).abs() <= limit + rounding * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_neighbours_or_on_the_threads(dtype: torch.dtype, isa: str | None) -> None:
    if isa is None:
        pytest.skip("PyTorch's product may add up in another order")
    x = torch.randn(53, 576, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = torch.get_num_threads()
    for bits in (4, 8):
        packed = pack(*draw(200, 576, 64, bits), bits)
        alone = torch.cat([matmul(row[None], packed, isa=isa) for row in x])
        for tokens in range(1, 54):
            assert torch.equal(matmul(x[:tokens], packed, isa=isa), alone[:tokens])
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(matmul(x, packed, isa=isa), alone)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("half", [16, 96, 20])
def test_gated(half: int, bits: int, isa: str | None) -> None:
    weight = draw(2 * half, 64, 32, bits)
    packed, matrix = pack(*weight, bits), dense(*weight)
    bias = torch.linspace(-1, 1, 2 * half)
    for tokens in (1, 3, 8, 30):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)) * (0.8 / (1 << bits))
        x[0] *= 10
        for given in (None, bias):
            gate, up = (x.double() @ matrix.T + (0 if given is None else given.double())).chunk(2, dim=1)
            found = gated_matmul(x, packed, given, isa=isa)
            torch.testing.assert_close(found.double(), gate * torch.sigmoid(gate) * up, rtol=1e-4, atol=1e-5)


def test_a_gate_that_fills_no_panel_is_computed_by_the_kernel_too(isa: str | None, monkeypatch) -> None:
    if isa is None:
        pytest.skip("there is no kernel")
    packed, x = pack(*draw(40, 64, 32, 4), 4), torch.randn(30, 64, generator=torch.Generator().manual_seed(4))
    expected = torch.cat([gated_matmul(row[None], packed, isa=isa) for row in x])
    monkeypatch.setattr(quantized_matmul, "_plain", lambda *_: pytest.fail("was computed in plain PyTorch"))
    assert torch.equal(gated_matmul(x, packed, isa=isa), expected)


def test_a_gate_of_any_size(isa: str | None) -> None:
    """silu(x) is 0 far below 0 and x far above."""
    packed = pack(torch.full((32, 8), 9, dtype=torch.uint8), torch.ones(32, 1).half(), torch.full((32, 1), 8).byte(), 4)
    x = torch.zeros(5, 8)
    x[:, 0] = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e15])
    found = gated_matmul(x, packed, isa=isa)[:, 0]
    assert found[:3].tolist() == [0, 0, 0]
    assert torch.equal(found[3:], x[3:, 0] ** 2)


def test_strides_and_empty_inputs(isa: str | None) -> None:
    weight = draw(48, 32, 16, 4)
    packed, matrix = pack(*weight, 4), dense(*weight)
    wide = whole_numbers(6, 64, torch.float32)
    for x in (wide[:, 32:], wide[::2, :32], wide[:, ::2], wide.T[:32, :5].T, wide[:0, :32], wide[1:2, 7:39]):
        assert torch.equal(matmul(x, packed, isa=isa).double(), x.double() @ matrix.T)
    assert gated_matmul(wide[:0, :32], packed, isa=isa).shape == (0, 24)
    zeros = torch._efficientzerotensor(2, 32)  # has no memory
    assert torch.equal(matmul(zeros, packed, isa=isa), torch.zeros(2, 48))
    negative = torch.complex(wide[:, :32], wide[:, 32:]).conj().imag  # PyTorch puts the negation off
    assert torch.equal(matmul(negative, packed, isa=isa).double(), -wide[:, 32:].double() @ matrix.T)
    bias = torch.arange(96.0)[::2]
    expected = wide[:, :32].double() @ matrix.T + bias.double()
    assert all(
        torch.equal(matmul(wide[:, :32], packed, b, isa=isa).double(), expected) for b in (bias, bias.bfloat16())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_and_tiny_numbers(dtype: torch.dtype, isa: str | None) -> None:
    codes, zeros = torch.tensor([[15] * 8, [1] * 8], dtype=torch.uint8), torch.tensor([[0], [0]], dtype=torch.uint8)
    scales = torch.tensor([[65504.0], [2.0**-24]]).half()  # the largest float16, and the smallest
    packed = pack(codes, scales, zeros, 4)
    for size in (2.0**100, 2.0**-100):
        found = matmul(torch.full((1, 8), size, dtype=dtype), packed, out_dtype=torch.float32, isa=isa)
        assert found.tolist() == [[size * 8 * 15 * 65504, size * 8 * 2.0**-24]]


def test_infinity_and_nan_stay_in_their_row(isa: str | None) -> None:
    packed = pack(*draw(32, 64, 32, 4), 4)
    x = whole_numbers(4, 64, torch.float32)
    clean = matmul(x, packed, isa=isa)
    x[1, 3], x[2, 60] = math.inf, math.nan
    found = matmul(x, packed, isa=isa)
    assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert not found[1:3].isfinite().all(dim=1).any()


def test_bytes_of_the_packed_weight() -> None:
    """Codes, scales and zeros of SmolLM2's layers: at most 0.28 of bfloat16's bytes."""
    for out, size in ((576, 576), (192, 576), (1536, 576), (576, 1536)):
        assert pack(*draw(out, size, 64, 4), 4).num_bytes <= 0.28 * 2 * out * size
        whole = torch.zeros(out, size, dtype=torch.uint8), torch.ones(out, 1).half(), torch.zeros(out, 1).byte()
        assert pack(*whole, 8).num_bytes <= 0.51 * 2 * out * size


def test_the_matrix_is_never_held(isa: str | None) -> None:
    packed = pack(*draw(2048, 1024, 64, 4), 4)
    x = torch.ones(1, 1024)
    with torch.inference_mode():
        assert peak_memory(lambda: matmul(x, packed, isa=isa)) < 2048 * 1024 * 2  # half of it in float32


def test_a_copy_stands_alone(isa: str | None) -> None:
    x = whole_numbers(2, 32, torch.float32)
    packed: PackedWeight | None = pack(*draw(48, 32, 16, 4), 4, shuffled_groups(32, 2))
    expected = matmul(x, packed, isa=isa)  # the original's structure is made
    copies = [copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))]
    assert copies[1].panels.data_ptr() != packed.panels.data_ptr()
    packed.panels.zero_()  # a deep copy that still read it would show
    assert all(torch.equal(matmul(x, each, isa=isa), expected) for each in copies[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits=5 is not valid: use 2, 3, 4 or 8."),
        ({"codes": torch.zeros(4, 32)}, "codes, scales and zeros are torch.float32, torch.float16 and torch.uint8"),
        ({"scales": torch.ones(4, 2)}, "are torch.uint8, torch.float32 and torch.uint8: use uint8, float16 and uint8."),
        ({"zeros": torch.zeros(4, 1).byte()}, r"zeros \[4, 1\]: they must be \[out, in\], \[out, groups\]"),
        ({"codes": torch.zeros(3, 32).byte()}, r"codes has shape \[3, 32\], scales \[4, 2\]"),
        ({"codes": torch.zeros(4, 24).byte()}, "scales 2 groups: each group must have the same number of inputs, a"),
        ({"codes": torch.full((4, 32), 16).byte()}, "codes has a value of 16: the most for 4 bits is 15."),
        ({"zeros": torch.full((4, 2), 8).byte(), "bits": 3}, "zeros has a value of 8: the most for 3 bits is 7."),
        ({"group_of": torch.zeros(32).int()}, "group_of must name each of 2 groups for 16 inputs."),
        ({"codes": torch.zeros(4, 32, device="meta").byte()}, "codes has layout torch.strided on meta"),
        ({"bits": 4.0}, "bits=4.0 is not valid"),
        ({"group_of": torch.zeros(32).bool()}, "dtype torch.bool on cpu: give the group"),
        (
            {"group_of": torch.zeros(31).int()},
            r"group_of has shape \[31\] and dtype torch.int32 on cpu: give",
        ),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    codes, scales, zeros = draw(4, 32, 16, 2)
    good = {"codes": codes, "scales": scales, "zeros": zeros, "bits": 4}
    pack(**good)
    with pytest.raises(InvalidArgumentError, match=message):
        pack(**(good | changes))


def test_inputs_that_do_not_fit() -> None:
    packed = pack(*draw(32, 32, 16, 4), 4)
    x = torch.zeros(1, 32)
    for wrong in (x[0], x[:, :16], x[None], x.double(), x.int()):
        with pytest.raises(InvalidArgumentError, match=r"the shape must be \[tokens, 32\], and the dtypes float32,"):
            matmul(wrong, packed)
    with pytest.raises(InvalidArgumentError, match=r"the result dtype torch\.int8"):
        matmul(x, packed, out_dtype=torch.int8)
    with pytest.raises(InvalidArgumentError, match=r"bias has shape \[16\] .*: use floating-point numbers \[32\]"):
        matmul(x, packed, torch.zeros(16))
    for wrong_bias in (torch.zeros(32, device="meta"), torch.zeros(32) + 1j):
        with pytest.raises(InvalidArgumentError, match=r"bias has shape \[32\] and dtype"):
            matmul(x, packed, wrong_bias)
    for elsewhere in (x.to("meta"), x.to_sparse()):
        with pytest.raises(InvalidArgumentError, match=r"x has layout .*: give a dense tensor there\."):
            matmul(elsewhere, packed)
    with pytest.raises(InvalidArgumentError, match="packed has 31 rows: gate and up must have half of them each"):
        gated_matmul(x, pack(*draw(31, 32, 16, 4), 4))
    with pytest.raises(InvalidArgumentError, match="x requires a gradient"):
        matmul(x.requires_grad_(), packed)
    for wrong_ids in ([0, 32], [-1]):
        with pytest.raises(InvalidArgumentError, match=r"ids has values from .*: the matrix has rows 0 to 31\."):
            rows(packed, torch.tensor(wrong_ids))
    for no_ids in (torch.tensor([True]), torch.tensor([1.0]), torch.tensor(1), torch.tensor([1], device="meta")):
        with pytest.raises(InvalidArgumentError, match=r"ids has shape .*: give int32 or int64"):
            rows(packed, no_ids)


def test_a_bias_whose_negation_is_put_off(isa: str | None) -> None:
    packed, x, bias = pack(*draw(32, 32, 16, 4), 4), whole_numbers(3, 32, torch.float32), torch.ones(32)
    assert torch.equal(matmul(x, packed, torch._neg_view(bias), isa=isa), matmul(x, packed, isa=isa) - 1)


def test_under_a_transform_of_torch_func() -> None:
    """What stands for a batch of tensors has no memory that a kernel could read."""
    packed, x = pack(*draw(32, 32, 16, 4), 4), whole_numbers(6, 32, torch.float32)
    batched = torch.vmap(lambda each: matmul(each, packed))(x.view(2, 3, 32))
    assert torch.equal(batched.flatten(0, 1), matmul(x, packed))


def test_a_tensor_without_numbers_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if quantized_matmul.unavailable() is not None:
        pytest.skip("only the kernel reads memory: PyTorch's own operations see what is fake")
    fake = FakeTensorMode().from_tensor(torch.zeros(3, 32))
    with pytest.raises(InvalidArgumentError, match="x is a FakeTensor without numbers in memory"):
        matmul(fake, pack(*draw(32, 32, 16, 4), 4))


def test_rows_in_another_dtype_and_of_no_id() -> None:
    packed = pack(*draw(40, 32, 16, 8), 8)
    assert rows(packed, torch.tensor([], dtype=torch.int64)).shape == (0, 32)
    ids = torch.tensor([3, 3, 39], dtype=torch.int32)
    assert torch.equal(rows(packed, ids, torch.bfloat16), rows(packed, ids).bfloat16())


def test_the_structures_are_those_of_the_header() -> None:
    """Field names in order, each of 64 bits."""
    header = kernels.source("cpu/matmul/call.h")
    for name, fields in (("Weight", packed_weight.WEIGHT_FIELDS), ("Call", quantized_matmul.CALL_FIELDS)):
        body = header.split(f"struct {name} {{")[1].split("};")[0]
        code = [line.split("//")[0].strip().rstrip(";") for line in body.splitlines()]
        declared = [word.strip() for line in code for word in line.split(",") if word.strip()]
        assert [each.split()[-1].strip("*") for each in declared] == list(fields)
        assert all("int64_t" in line or "*" in line for line in code if line)
    assert f"PANEL_ROWS = {packed_weight.PANEL_ROWS};" in header


def test_without_a_compiler_it_says_so_and_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(library: str, isa: str | None) -> object:
        raise MissingDependencyError("There is no compiler.")

    weight = draw(32, 32, 16, 4)
    packed, x = pack(*weight, 4), whole_numbers(3, 32, torch.bfloat16)
    monkeypatch.setattr(cpu_library, "load_library", fail)
    monkeypatch.setattr(cpu_library, "unavailable", lambda library: "There is no compiler.")
    quantized_matmul._function.cache_clear()
    try:
        assert quantized_matmul.path() == "torch"
        with pytest.warns(UserWarning, match=r"multiplied in plain PyTorch\. There is no compiler\."):
            found = matmul(x, packed, out_dtype=torch.float32)
        assert torch.equal(found.double(), x.double() @ dense(*weight).T)
        with pytest.raises(MissingDependencyError, match=r"There is no compiler\."):
            matmul(x, packed, isa="portable")
    finally:
        quantized_matmul._function.cache_clear()


def test_an_unknown_instruction_set_is_refused() -> None:
    packed = pack(*draw(32, 32, 16, 4), 4)
    with pytest.raises(InvalidArgumentError, match="isa is 'sse9'; this processor can run portable"):
        matmul(torch.zeros(1, 32), packed, isa="sse9")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    code = """
import os, signal, torch
from vllm_teach.kernels.quantized_matmul import matmul, pack
torch.set_num_threads(2)
packed = pack(torch.full((512, 512), 9).byte(), torch.ones(512, 8).half(), torch.zeros(512, 8).byte(), 4)
x = torch.ones(4, 512)
expected = matmul(x, packed).tolist()
if (child := os.fork()) == 0:
    signal.alarm(60)
    os._exit(0 if matmul(x, packed).tolist() == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    if quantized_matmul.unavailable() is None:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip() == "0"
