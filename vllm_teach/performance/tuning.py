"""`vllm-teach tune`: time every usable backend on a small grid of calls, and keep the result for this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from vllm_teach import backends
from vllm_teach.attention.layout import Layout, Paged
from vllm_teach.attention.shapes import check_count
from vllm_teach.backends.hardware import detect_hardware
from vllm_teach.backends.measured import DTYPES, Measurements, Series
from vllm_teach.backends.selection import check_names
from vllm_teach.backends.spec import AttentionSpec, Backend
from vllm_teach.backends.tuning_file import describe_machine, make_folder, save_measurements, tuning_file
from vllm_teach.errors import InvalidArgumentError, MissingDependencyError
from vllm_teach.performance.side_by_side import race

HEADS, HEAD_DIM, BLOCK_SIZE = 8, 64, 16
# Lengths of a prefill, and how many keys a decoding step reads. A window is an eighth of the length.
PREFILL_LENGTHS, DECODE_LENGTHS = (128, 512, 2048), (256, 1024, 4096)
_ROUNDS = 5
# Seconds after which a point has been timed enough, and beyond which a backend is not timed at longer lengths.
_ENOUGH, _TOO_LONG = 0.25, 0.5


class Grid(NamedTuple):
    """What is timed: every series at every length of its kind."""

    series: tuple[Series, ...]
    prefill_lengths: tuple[int, ...] = PREFILL_LENGTHS
    decode_lengths: tuple[int, ...] = DECODE_LENGTHS

    def lengths(self, series: Series) -> tuple[int, ...]:
        """Return the lengths at which a series is timed, from short to long."""
        return self.decode_lengths if series.kind in ("decode", "paged") else self.prefill_lengths

    def points(self) -> list[tuple[Series, int]]:
        """Return every (series, length). Raises InvalidArgumentError when there is none, or a length below 1."""
        found = [
            (series, check_count("length", length, 1)) for series in self.series for length in self.lengths(series)
        ]
        if not found:
            raise InvalidArgumentError("grid has nothing to time; give it a series and a length.")
        return found


def default_grid() -> Grid:
    """Return the grid of `vllm-teach tune`: 16 series of three lengths."""
    widths = {"causal": (8, 32), "full": (8,), "local": (8,), "decode": (8, 64), "paged": (8, 64)}
    return Grid(
        tuple(Series(kind, dtype, width) for dtype in DTYPES for kind, all_ in widths.items() for width in all_)
    )


def tune(
    progress: bool = True,
    device: str | None = None,
    names: Iterable[str] | None = None,
    grid: Grid | None = None,
) -> Measurements:
    """Time the backends, write the result to this machine's file, and return it; printed, it is a table.

    `device` is "cuda" where there is one, else "cpu". `names` are the backends to time; by default all that run here,
    but for `flex` on a CPU, which would compile longer than everything else takes. Takes about a minute on two cores.
    The file is written at the end and replaces an older one: an interrupted sweep leaves that as it was.

    Raises InvalidArgumentError for a device, a grid or a backend that cannot be timed here, and CacheError when the
    file cannot be written. Warns of a backend that turns out not to work when it is first called, and goes on without.
    """
    from tqdm import tqdm

    grid = grid or default_grid()
    points = grid.points()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine, file = describe_machine(device), tuning_file(device)
    make_folder(file)  # an error now, not in a minute
    chosen = _start(tunable(device), device) if names is None else _check_runnable(names, device)
    seconds: dict[Series, dict[str, dict[int, float]]] = {series: {} for series in grid.series}
    with torch.no_grad(), tqdm(points, desc="tune", disable=not progress) as bar:
        for series, length in bar:
            bar.set_postfix_str(f"{series.kind}, n = {length}")
            for name, taken in _time_point(series, length, device, chosen, seconds[series]).items():
                seconds[series].setdefault(name, {})[length] = taken
    found = Measurements(machine, seconds)
    save_measurements(found, file)
    return found


def tunable(device: str) -> list[str]:
    """Return the backends that are timed by default: those that run here, without `flex` on a CPU."""
    hardware = detect_hardware()
    runnable = [name for name in backends.names() if hardware.why_not(name, device) is None]
    return [name for name in runnable if (name, device) != ("flex", "cpu")]


def _check_runnable(names: Iterable[str], device: str) -> list[str]:
    checked = check_names("names", names)
    if not checked:
        raise InvalidArgumentError("names is empty; name a backend, or leave it out.")
    for name in checked:
        if (reason := detect_hardware().why_not(name, device)) is not None:
            raise InvalidArgumentError(f"names holds {name!r}, which cannot run here ({reason.removesuffix('.')}).")
    return checked


def _start(names: Iterable[str], device: str) -> list[str]:
    """Return those of `names` that work: some find out that they cannot be built only when they are first called."""
    working = []
    for name in names:
        backend, call = backends.get(name), make_call(Series("causal", "float32", 1), 8, device)
        try:
            if backend.supports(call.spec()) is None:
                call.of(backend)()
        except MissingDependencyError as error:
            detect_hardware.cache_clear()
            warnings.warn(f"The backend {name} failed and is not timed. {error}", RuntimeWarning, stacklevel=3)
        else:
            working.append(name)
    return working


class TimedCall(NamedTuple):
    """A call to time: `run(*tensors, layout=layout, **arguments)`."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    layout: Layout | None
    arguments: dict[str, Any]

    def spec(self) -> AttentionSpec:
        """Return the spec of the call."""
        return AttentionSpec.of(*self.tensors, layout=self.layout, **self.arguments)

    def of(self, backend: Backend) -> Callable[[], torch.Tensor]:
        """Return a function that makes the call."""
        return lambda: backend.run(*self.tensors, layout=self.layout, **self.arguments)


def make_call(series: Series, length: int, device: str = "cpu") -> TimedCall:
    """Return the call of `series` at `length`, with random tensors: `width` is batch * HEADS, one K/V head per head.

    Raises InvalidArgumentError for a width above HEADS that is no multiple of it.
    """
    if series.width > HEADS and series.width % HEADS:
        raise InvalidArgumentError(f"width is {series.width}; give a multiple of the {HEADS} heads, or less.")
    dtype = getattr(torch, series.dtype)
    batch = max(1, series.width // HEADS)
    heads = min(HEADS, series.width)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, heads, HEAD_DIM, device=device).to(dtype)

    if series.kind == "paged":
        blocks = -(-length // BLOCK_SIZE)
        table = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32)
        layout = Paged(starts, table, torch.full((batch,), length, dtype=torch.int32, device=device))
        cache = (draw(batch * blocks, BLOCK_SIZE), draw(batch * blocks, BLOCK_SIZE))
        return TimedCall((draw(batch), *cache), layout, {"causal": True})
    q_len = 1 if series.kind == "decode" else length
    window = (max(1, length // 8) - 1, 0) if series.kind == "local" else (-1, -1)
    tensors = (draw(batch, q_len), draw(batch, length), draw(batch, length))
    return TimedCall(tensors, None, {"causal": series.kind != "full", "window_size": window})


def _time_point(
    series: Series, length: int, device: str, names: list[str], so_far: dict[str, dict[int, float]]
) -> dict[str, float]:
    """Return the median seconds of each backend that supports the call and is not hopelessly slow."""
    call = make_call(series, length, device)
    spec = call.spec()
    runs = {
        name: call.of(backend)
        for name in names
        if (backend := backends.get(name)).supports(spec) is None and not _hopeless(so_far.get(name, {}), length)
    }
    if not runs:
        return {}
    seconds = race(runs, next(iter(runs)), rounds=_ROUNDS, device=device, enough=_ENOUGH).seconds
    return {name: timing.median for name, timing in seconds.items()}


def _hopeless(points: dict[int, float], length: int) -> bool:
    """Whether a backend was so slow at the last length that the next one is not worth its time."""
    if not points:
        return False
    last = max(points)
    return points[last] * (length / last) > _TOO_LONG
