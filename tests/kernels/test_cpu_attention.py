"""The C++ attention kernel's code for each instruction set, and the numbers it is made of: conversions, 2^x, tanh."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch

from vllm_teach.backends import cpu
from vllm_teach.backends.conformance import ROWS, Row, check_forward
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_attention, cpu_build, cpu_library

ISAS = tuple(cpu_build.ISA_FLAGS)
EVERY_TENTH = [row for row in ROWS if cpu.supports(row.spec()) is None][::10]


def run(isa: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: object) -> list[torch.Tensor] | None:
    """Return (out, lse) of the code for `isa`; None, after checking the error, where it cannot run or be built."""
    wanted: type[Exception] | None = None
    if isa not in cpu_library.runnable_isas():
        wanted = InvalidArgumentError
    elif cpu_build.why_not("attention", isa) is not None:
        wanted = MissingDependencyError
    if wanted is None:
        return list(cpu.attention_forward(q, k, v, isa=isa, **arguments))
    with pytest.raises(wanted):
        cpu.attention_forward(q, k, v, isa=isa, **arguments)
    return None


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("row", EVERY_TENTH, ids=lambda row: row.name)
def test_conformance(row: Row, isa: str) -> None:
    if run(isa, *torch.zeros(3, 1, 1, 1, 8)) is not None:
        check_forward(lambda *tensors, **arguments: cpu.attention_forward(*tensors, isa=isa, **arguments)[0], row)


def every_16_bit_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 1, 1, 256)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_survives(dtype: torch.dtype, isa: str) -> None:
    """With one key the output is its value: read, multiplied by 1 and written."""
    v = every_16_bit_number(dtype)
    for q_len in (1, 6):  # few rows, and more
        q = torch.zeros(256, q_len, 1, 256, dtype=dtype)
        if (found := run(isa, q, torch.zeros_like(v), v)) is None:
            return
        expected = v.expand_as(q)
        if (isa, dtype) == ("avx512_bf16", torch.bfloat16) and q_len > 1:
            # The instruction that multiplies pairs takes numbers below the normal ones for 0.
            expected = torch.where(expected.abs() < torch.finfo(dtype).tiny, 0.0, expected)
        assert torch.equal(found[0].isnan(), expected.isnan())
        assert torch.equal(found[0].nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_nearest_even(dtype: torch.dtype, isa: str) -> None:
    """Two keys with equal scores: the output is (a + b) / 2, which float32 holds exactly or rounds as PyTorch does."""
    a = every_16_bit_number(dtype)
    near = a.view(torch.int16).add(1).view(dtype)  # halfway cases
    far = a.flatten()[torch.randperm(2**16)].view_as(a)
    for b in (near, far):
        v = torch.cat((a, b), dim=1)  # [256, 2, 1, 256]
        found = run(isa, torch.zeros(256, 1, 1, 256, dtype=dtype), torch.zeros_like(v), v)
        if found is None:
            return
        expected = (a.float() * 0.5 + b.float() * 0.5).to(dtype)
        direct = ((a.float() + b.float()) * 0.5).to(dtype)
        usable = a.isfinite() & b.isfinite() & (expected == direct)  # the sum may overflow
        assert torch.equal(found[0][usable], expected[usable])
        assert usable.float().mean() > 0.9


@pytest.mark.parametrize("isa", ISAS)
def test_exponential(isa: str) -> None:
    """Two keys with scores 0 and -x and values 0 and 1 give e^-x / (1 + e^-x)."""
    x = torch.cat((torch.linspace(0, 100, 5000), torch.logspace(-8, 2, 1000)))
    k, v = torch.zeros(2, len(x), 2, 1, 1)
    k[:, 1, 0, 0], v[:, 1] = -x, 1
    for q_len in (1, 6):
        if (found := run(isa, torch.ones(len(x), q_len, 1, 1), k, v, scale=1.0)) is None:
            return
        expected = torch.sigmoid(-x.double())
        error = (found[0][:, -1, 0, 0].double() - expected).abs() / expected
        # The exponent's own rounding, up to half a unit in the last place of x * log2 e, counts too.
        limit = 5e-7 + x.double() * 1.3e-7
        normal = x < 87  # below 2^-126, numbers lose digits or become 0
        assert (error <= limit)[normal].all()
        assert (found[0][:, -1, 0, 0][~normal].abs() < 2e-38).all()


@pytest.mark.parametrize("isa", ISAS)
def test_softcap(isa: str) -> None:
    """With one key the log-sum-exp is its score, cap * tanh(x / cap)."""
    x = torch.cat((torch.linspace(-40, 40, 4001), torch.logspace(-6, 6, 500), torch.tensor([0.0])))
    k = x.view(-1, 1, 1, 1)
    found = run(isa, torch.ones_like(k), k, torch.ones_like(k), scale=1.0, softcap=7.0)
    if found is not None:
        expected = 7 * torch.tanh(x.double() / 7)
        assert ((found[1].flatten().double() - expected).abs() <= 1e-6 * expected.abs()).all()


def test_an_unknown_instruction_set_is_refused() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(InvalidArgumentError, match=r"isa is 'sse9'; this processor can run portable"):
        cpu.attention_forward(q, q, q, isa="sse9")


def test_the_structures_are_those_of_the_header() -> None:
    """Field names in order: ctypes and the compiler lay the same fields out in the same way."""
    from vllm_teach import kernels

    header = kernels.source("cpu/attention/call.h")
    for structure, name in (
        (cpu_attention.Stride, "Stride"),
        (cpu_attention.SequenceRow, "Sequence"),
        (cpu_attention.TileList, "TileList"),
        (cpu_attention.Call, "Call"),
    ):
        body = header.split(f"struct {name} {{")[1].split("};")[0]
        code = [line.split("//")[0].strip() for line in body.splitlines()]
        names = [word.strip(" *") for line in code for word in line.rstrip(";").split(",") if word.strip()]
        assert [name.split()[-1].strip("*") for name in names] == [field[0] for field in structure._fields_]
    assert f"TILE_KEYS = {cpu_attention.TILE_KEYS};" in header


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_it_uses_the_best_that_pytorch_uses_too(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {"DEFAULT": ISAS[:1], "AVX2": ISAS[:2], "AVX512": ISAS}  # the most basic first
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    runnable = cpu_library.runnable_isas()
    assert cpu_library.isa.__wrapped__() == [isa for isa in levels[capability] if isa in runnable][-1]


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    code = """
import os, signal, torch
from vllm_teach.backends import cpu
torch.set_num_threads(2)
q = torch.randn(1, 600, 2, 16)
expected = cpu.run(q, q, q)
if (child := os.fork()) == 0:
    signal.alarm(60)
    os._exit(0 if cpu.run(q, q, q).tolist() == expected.tolist() else 1)  # PyTorch would wait for threads, too
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    if cpu.unavailable() is None:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip() == "0"


def test_many_threads_may_call_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    if cpu.unavailable() is not None:
        return
    inputs = [torch.randn(3, 1, 40 + 9 * i, 2, 32) for i in range(8)]
    expected = [cpu.run(*tensors, causal=True) for tensors in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda tensors: partial(cpu.run, causal=True)(*tensors), inputs * 5))
    assert all(torch.equal(out, want) for out, want in zip(found, expected * 5, strict=True))


def test_log_sum_exp_of_many_equal_scores() -> None:
    q = torch.zeros(1, 8, 1, 16)
    k = torch.zeros(1, 700, 1, 16)
    found = run("portable", q, k, k)
    if found is not None:
        torch.testing.assert_close(found[1], torch.full_like(found[1], math.log(700)), rtol=1e-6, atol=0)
