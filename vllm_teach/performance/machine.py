"""What this machine attains: matrix-multiply rate per dtype, read and copy bandwidth. Measured, never a data sheet."""

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from vllm_teach.backends.hardware import cpu_name
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.timing import Timing, time_median

DTYPES = ("float32", "bfloat16", "float16")
_MIB = 1024**2


@dataclass(frozen=True)
class Rate:
    """Work per second over several repetitions: FLOP/s or bytes/s."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, work: float, timing: Timing) -> "Rate":
        """Divide `work` (FLOPs or bytes of one call) by the time of each call."""
        rates = [work / seconds for seconds in timing.samples]
        return cls(statistics.median(rates), min(rates), max(rates), len(rates))


@dataclass(frozen=True)
class Machine:
    """One device as measured: its name, its settings and its ceilings.

    `matmul` maps a dtype's name to FLOP/s (a multiply-add counts as two); `skipped` maps the dtypes without a useful
    rate to the reason. Bandwidths are bytes/s of main (or GPU) memory. `caches` maps "L1d", "L2", ... to bytes, and is
    empty where the operating system does not tell.
    """

    device: str
    name: str
    threads: int
    torch_version: str
    matmul: dict[str, Rate]
    skipped: dict[str, str]
    read_bandwidth: Rate
    copy_bandwidth: Rate
    caches: dict[str, int]

    @property
    def label(self) -> str:
        """A short name for captions: "AMD EPYC, 2 threads"."""
        return f"{self.name}, {_threads(self.threads)}" if self.device == "cpu" else self.name

    def rate(self, dtype: str) -> Rate:
        """Return the matrix rate of `dtype`, FLOP/s; raises InvalidArgumentError when it was not measured."""
        if dtype not in self.matmul:
            why = f" ({self.skipped[dtype]})" if dtype in self.skipped else ""
            raise InvalidArgumentError(f"dtype={dtype!r} was not measured{why}: use one of {', '.join(self.matmul)}.")
        return self.matmul[dtype]

    def ridge_point(self, dtype: str = "float32") -> float:
        """Return the FLOPs per byte read above which `dtype` is limited by arithmetic, below by memory.

        Source: Williams, Waterman, Patterson, "Roofline" (2009), section 3.
        """
        return self.rate(dtype).median / self.read_bandwidth.median

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain dicts, strings and numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """Return the ceilings as a few lines of text: median (lowest to highest)."""
        lines = [self.label, f"torch {self.torch_version}"]
        for dtype, rate in self.matmul.items():
            lines.append(_line(f"matrix multiply, {dtype}", rate, "GFLOP/s"))
        lines += [f"{f'matrix multiply, {dtype}':<26} not measured: {why}" for dtype, why in self.skipped.items()]
        lines.append(_line("memory read", self.read_bandwidth, "GB/s"))
        lines.append(_line("memory copy", self.copy_bandwidth, "GB/s"))
        lines += [
            f"{f'ridge point, {dtype}':<26}{self.ridge_point(dtype):9.1f} FLOP per byte read" for dtype in self.matmul
        ]
        return "\n".join(lines)


def _line(what: str, rate: Rate, unit: str) -> str:
    return f"{what:<26}{rate.median / 1e9:9.1f} {unit}  ({rate.low / 1e9:.1f} to {rate.high / 1e9:.1f})"


def measure_this_machine(quick: bool = True, device: str = "auto") -> Machine:
    """Measure the ceilings of `device`: "cpu", "cuda", or "auto" (CUDA where there is one).

    Takes a few seconds; `quick=False` repeats each measurement 25 times rather than 9. Uses the current
    `torch.get_num_threads()`, and says it. Allocates two arrays of eight last-level caches each (256 MiB at least), but
    at most 1 GiB and an eighth of the free memory: where that is not far above the cache, "memory" includes it. Raises
    InvalidArgumentError for another device, or "cuda" where there is none.

    The copy counts each byte twice, read and written; a processor that fetches a line before it overwrites it moves
    half as much again, which is why copying may look slower than reading.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device={device!r} cannot be measured: use 'auto', 'cpu' or 'cuda'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError("device='cuda' is not there: torch sees no CUDA device, use 'cpu'.")
    repeats = 9 if quick else 25
    caches = _gpu_caches() if device == "cuda" else _cpu_caches()
    with torch.inference_mode():
        matmul, skipped = _matmul_rates(device, repeats)
        read, copy = _bandwidths(device, repeats, max(caches.values(), default=64 * _MIB))
    return Machine(
        device=device,
        name=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        matmul=matmul,
        skipped=skipped,
        read_bandwidth=read,
        copy_bandwidth=copy,
        caches=caches,
    )


def device_label(device: str = "auto") -> str:
    """Name the device and, for a processor, PyTorch's threads, without measuring: "AMD EPYC, 2 threads".

    "auto" is CUDA where there is one. Raises InvalidArgumentError for "cuda" where there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError("device='cuda' has no name here: torch sees no CUDA device, use 'cpu'.")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {_threads(torch.get_num_threads())}"


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _matmul_rates(device: str, repeats: int) -> tuple[dict[str, Rate], dict[str, str]]:
    """Rate of square matrix products per dtype, at the size that `_grown_matmul` picks, and the dtypes left out."""
    rates: dict[str, Rate] = {}
    skipped: dict[str, str] = {}
    for name in DTYPES:
        product, seconds, n = _grown_matmul(device, getattr(torch, name))
        # A dtype without instructions of its own can be a hundred times slower; its ceiling teaches nothing.
        rate = 2.0 * n**3 / seconds
        if rates and rate < next(iter(rates.values())).median / 10:
            skipped[name] = f"{rate / 1e9:.1f} GFLOP/s, below a tenth of {next(iter(rates))}"
            continue
        rates[name] = Rate.of(2.0 * n**3, time_median(product, repeats, warmup=1, device=device))
    return rates, skipped


def _grown_matmul(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], float, int]:
    """Double the size until one product takes 20 ms (or is large): small ones measure the call, not the arithmetic."""
    n, largest = (512, 2048) if device == "cpu" else (1024, 8192)
    generator = torch.Generator(device).manual_seed(0)
    while True:
        a, b = (torch.rand(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
        out = torch.empty(n, n, device=device, dtype=dtype)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(a, b, out=out)

        # The fastest of three, so that an interruption does not end the growth early.
        seconds = time_median(product, repeats=3, warmup=1, device=device).low
        if seconds >= 20e-3 or n >= largest:
            return product, seconds, n
        n *= 2


def _bandwidths(device: str, repeats: int, last_cache: int) -> tuple[Rate, Rate]:
    """Read (sum) and copy bandwidth over arrays of the size that `measure_this_machine` describes."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    size = int(min(max(8 * last_cache, 256 * _MIB), 1024 * _MIB, free / 8))
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    nbytes = source.numel() * 4
    read = time_median(lambda: source.sum(), repeats, warmup=2, device=device)
    copy = time_median(lambda: target.copy_(source), repeats, warmup=2, device=device)
    return Rate.of(nbytes, read), Rate.of(2 * nbytes, copy)


def _cpu_caches(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, int]:
    """Cache sizes that core 0 sees, bytes; empty where Linux's sysfs is not there."""
    found: dict[str, int] = {}
    for index in sorted(root.glob("index*")):
        level, kind, size = ((index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}" + ("d" if kind == "Data" else "")] = int(size.removesuffix("K")) * 1024
    return found


def _gpu_caches() -> dict[str, int]:
    return {"L2": torch.cuda.get_device_properties(0).L2_cache_size}
