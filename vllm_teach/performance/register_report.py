"""What NVIDIA's compiler allots to our norm kernels, kept in a result file for machines that have no such compiler.

    python -m vllm_teach.performance.register_report     # compiles, and writes data/results/norm_registers.json

No GPU is needed for either, and the numbers are the compiler's, not a clock's: the same source, compiler and
architecture give the same numbers on every machine. A test compiles anew where it can, and compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_teach import kernels, resources
from vllm_teach.errors import ResourceNotFoundError
from vllm_teach.kernels import cuda_compiler
from vllm_teach.kernels.cuda_compiler import KernelReport

SOURCES = ("cuda/plain_layer_norm.cu", "cuda/layer_norm.cu")
ARCHITECTURES = ("sm_80", "sm_90")
COMMAND = "python -m vllm_teach.performance.register_report"


@dataclass(frozen=True)
class RegisterReport:
    """The reports of all kernels in SOURCES, by architecture; which compiler made them, and of which source texts."""

    kernels: tuple[KernelReport, ...]
    compiler: str
    command: str
    sources: dict[str, str]

    def find(self, name: str, arch: str) -> KernelReport:
        """Return one kernel's report; raises ResourceNotFoundError that lists the kernels there are."""
        for report in self.kernels:
            if (report.name, report.arch) == (name, arch):
                return report
        names = ", ".join(sorted({report.name for report in self.kernels}))
        raise ResourceNotFoundError(f"name={name!r} on {arch!r} was not compiled: choose one of {names}.")

    def to_json(self) -> dict[str, object]:
        """Return the report as what `json.dump` takes."""
        return asdict(self)


def measure_registers(architectures: Sequence[str] = ARCHITECTURES, sources: Sequence[str] = SOURCES) -> RegisterReport:
    """Compile `sources` for each architecture, ten seconds each. Raises MissingDependencyError without nvcc."""
    texts = {name: kernels.source(name) for name in sources}
    reports = [
        report
        for arch in architectures
        for text in texts.values()
        for report in cuda_compiler.compile_report(text, arch)
    ]
    nvcc = cuda_compiler.find_nvcc()
    version = cuda_compiler.nvcc_version(nvcc) if nvcc else None
    return RegisterReport(tuple(reports), f"nvcc {version}", COMMAND, {name: digest(name) for name in sources})


def read_registers() -> RegisterReport:
    """Return the report of the result file. Raises ResourceNotFoundError where there is none."""
    path = result_file()
    if not path.is_file():
        raise ResourceNotFoundError(f"{path.name} is not among the result files: write it with {COMMAND}.")
    found = json.loads(path.read_text(encoding="utf-8"))
    found["kernels"] = tuple(KernelReport(**one) for one in found["kernels"])
    return RegisterReport(**found)


def result_file() -> Path:
    """Return where the result file lies."""
    return resources.folder("data") / "results" / "norm_registers.json"


def digest(source: str) -> str:
    """Return the SHA-256 of a kernel source's text: a report of another text is out of date."""
    return hashlib.sha256(kernels.source(source).encode()).hexdigest()


def main() -> None:
    """Compile, write the result file, and say how many kernels are in it."""
    report = measure_registers()
    path = result_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{len(report.kernels)} kernels by {report.compiler}: {path.name}")


if __name__ == "__main__":
    main()
