"""`vllm-teach bench kernels`: every kernel is in it, right, and beside the operation that computes the same."""

import json
import re
from dataclasses import replace

import pytest
import torch

from vllm_teach import cli, kernels
from vllm_teach.attention.patterns import BlockSparsePattern
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.kernels import cpu_norms, quantized_matmul
from vllm_teach.performance import kernel_bench
from vllm_teach.performance.kernel_bench import KernelBench, bench_kernels, format_kernels
from vllm_teach.performance.kernel_cases import KERNELS, Case, Kernel


@pytest.fixture(scope="module")
def bench() -> KernelBench:
    return bench_kernels(length=64, dtype="float32", rounds=2, progress=False)


def fake(name: str = "a kernel", device: str = "cpu", reason: str | None = None, **case: object) -> Kernel:
    """A kernel whose one case returns 3 where 1 is right; PyTorch's gives 1.5."""
    calls = {"ours": lambda: torch.tensor([3.0]), "theirs": lambda: torch.tensor([1.5]), **case}
    cases = [Case("case", their_name="torch", exact=lambda: torch.tensor([1.0], dtype=torch.float64), **calls)]  # type: ignore[arg-type]
    return Kernel(name, ("cpu/it",), device, lambda: reason, lambda length, dtype, device: cases)


def test_every_kernel_source_belongs_to_a_kernel_of_the_table() -> None:
    named = {source for kernel in KERNELS for source in kernel.sources}
    text = {name: kernels.source(name) for name in kernels.list_sources()}
    launched = {
        name
        for name in text
        if name.startswith("triton_kernels/") and re.search(r"@triton\.jit.*\ndef \w+_kernel\(", text[name])
    }
    assert len(launched) >= 8
    assert launched <= named
    assert {name for name in text if name.endswith(".cu")} <= named
    folders = {name.rpartition("/")[0] for name in text if name.startswith("cpu/") and name.endswith(".cpp")}
    assert {"cpu/attention", "cpu/norms", "cpu/matmul"} == folders <= named
    assert all(any(source == name or name.startswith(f"{source}/") for name in text) for source in named)


def test_each_kernel_has_figures_or_a_reason(bench: KernelBench) -> None:
    have = {row.kernel for row in bench.rows}
    left = {one.kernel: one.reason for one in bench.left_out}
    assert have | set(left) == {kernel.name for kernel in KERNELS}
    assert not have & set(left)
    assert all(reason.endswith(".") for reason in left.values())
    if not torch.cuda.is_available():
        assert "CUDA" in left["CUDA norms"]
        assert {name for name in left if name.startswith("Triton")} == {
            kernel.name for kernel in KERNELS if kernel.name.startswith("Triton")
        }


def test_those_of_the_cpu_are_as_exact_as_pytorch(bench: KernelBench) -> None:
    if quantized_matmul.unavailable():
        pytest.skip("there is no compiler")
    assert {row.kernel for row in bench.rows} == {"C++ attention", "C++ norms", "C++ quantised products"}
    assert len(bench.rows) == 3 + 4 + 2
    for row in bench.rows:
        assert row.error <= 2 * row.their_error + 1e-5, row
        assert len(row.ratio.samples) == bench.rounds == 2


def test_pytorch_does_not_pay_for_its_mask_in_each_call(monkeypatch) -> None:
    cpu_kernel = next(kernel for kernel in KERNELS if kernel.name == "C++ attention")
    sparse = next(case for case in cpu_kernel.cases(64, torch.float32, "cpu") if "block-sparse" in case.name)
    monkeypatch.setattr(BlockSparsePattern, "mask", lambda *_: pytest.fail("makes a mask"))
    assert sparse.theirs().shape == (1, 64, 8, 64)


def test_an_error_is_the_distance_from_float64() -> None:
    [row] = bench_kernels(length=64, rounds=3, progress=False, kernels=(fake(),)).rows
    assert (row.error, row.their_error) == (2.0, 0.5)
    assert row.case == "case"


def test_a_kernel_of_another_device_or_without_its_compiler_is_named() -> None:
    def fail() -> torch.Tensor:
        raise MissingDependencyError("There is no compiler.")

    given = (
        fake("elsewhere", device="cuda"),
        fake("unbuilt", reason="It needs more."),
        fake("failing", ours=fail),
        fake("fine"),
    )
    bench = bench_kernels(length=64, progress=False, kernels=given)
    assert {one.kernel: one.reason for one in bench.left_out} == {
        "elsewhere": "It runs on cuda, and the device asked for is cpu.",
        "unbuilt": "It needs more.",
        "failing": "It failed: There is no compiler.",
    }
    assert [row.kernel for row in bench.rows] == ["fine"]
    text = format_kernels(bench)
    assert "  unbuilt (cpu/it): It needs more." in text
    assert "2.0e+00, 5.0e-01" in text


def test_a_kernel_whose_build_fails_has_no_figures_of_what_stood_in_for_it() -> None:
    """Norms and products fall back to PyTorch where the compiler fails, which shows at the first call."""
    built: list[str] = []

    def stand_in() -> torch.Tensor:
        built.append("The compiler failed.")
        return torch.tensor([1.0])

    kernel = replace(fake(ours=stand_in), why_not=lambda: built[0] if built else None)
    bench = bench_kernels(length=64, progress=False, kernels=(kernel,))
    assert bench.rows == []
    assert [one.reason for one in bench.left_out] == ["It failed: The compiler failed."]


def test_a_kernel_that_fails_in_its_second_case_is_not_in_both_lists() -> None:
    def fail() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")

    [good], [bad] = (fake(ours=ours).cases(64, torch.float32, "cpu") for ours in (lambda: torch.ones(1), fail))
    kernel = replace(fake(), cases=lambda length, dtype, device: [good, bad])
    bench = bench_kernels(length=64, progress=False, kernels=(kernel,))
    assert bench.rows == []
    assert [(one.kernel, one.reason) for one in bench.left_out] == [
        ("a kernel", "It failed: CUDA out of memory. Tried 2 GiB.")
    ]


def test_a_bug_in_a_kernel_ends_the_run() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("The size of tensor a must match the size of tensor b")

    with pytest.raises(RuntimeError, match="must match"):
        bench_kernels(length=64, progress=False, kernels=(fake(ours=fail),))


def test_norms_that_pytorch_computes_are_not_timed_as_the_kernels(monkeypatch) -> None:
    """Here those of a dtype that the kernels are made to forget; on a GPU, those of rows that are too long."""
    [kernel] = (replace(kernel, why_not=lambda: None) for kernel in KERNELS if kernel.name == "C++ norms")
    monkeypatch.setattr(cpu_norms, "DTYPES", (torch.bfloat16,))
    bench = bench_kernels(length=64, dtype="float32", rounds=1, progress=False, kernels=(kernel,))
    assert bench.rows == []
    [left] = bench.left_out
    assert left.reason.startswith("PyTorch computes these norms: the kernels know float32, ")


def test_kernels_that_share_a_reason_share_its_lines() -> None:
    given = (fake("one", reason="There is no GPU."), fake("two", reason="There is no GPU."))
    text = format_kernels(bench_kernels(length=64, progress=False, kernels=given))
    assert text.endswith("not in the table\n  one (cpu/it), two (cpu/it): There is no GPU.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 100}, "length=100 is not valid: use a multiple of 64"),
        ({"length": 0}, "length"),
        ({"dtype": "int8"}, "dtype='int8' is not known"),
        ({"rounds": 0}, "rounds=0 measures nothing"),
        ({"device": "tpu"}, "device='tpu' has no clock here"),
    ],
)
def test_what_cannot_be_measured(arguments: dict, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        bench_kernels(progress=False, **arguments)


def test_the_command(bench: KernelBench, monkeypatch, tmp_path, capsys) -> None:
    seen: list[dict] = []
    monkeypatch.setattr(kernel_bench, "bench_kernels", lambda **k: seen.append(k) or bench)
    file = tmp_path / "kernels.json"
    assert cli.main(["bench", "kernels", "--length", "128", "--dtype", "float32", "--quiet", "--json", str(file)]) == 0
    assert seen == [{"length": 128, "dtype": "float32", "rounds": 7, "device": "cpu", "progress": False}]
    assert capsys.readouterr().out == format_kernels(bench) + "\n"
    assert json.loads(file.read_text()).items() >= json.loads(json.dumps(bench.to_json())).items()
    assert replace(bench, rows=[]).to_json()["rows"] == []
