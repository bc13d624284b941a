"""Sections of items within a time limit: the important ones first, each failure recorded, what is left out named.

Nothing here knows of GPUs. An item is a function that returns records; what it raises is recorded with its traceback,
and the next item runs. A section ends when its share of the time is over; what an earlier one left is added to it.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch

from vllm_teach.validation.gpu.result import Record, SectionResult

Clock = Callable[[], float]

# Of the limit; the rest is for an item that overruns, and for writing the result.
_USED_SHARE = 0.94


@dataclass(frozen=True)
class Item:
    """A piece of work. For a parallel section `run` must be picklable: a module's function, or a partial of one."""

    name: str
    run: Callable[[], list[Record]]


@dataclass(frozen=True)
class Section:
    """Items on one subject. `seconds` is their share of the limit; `items` is called when the section starts.

    `workers` > 0 runs the items in that many processes: for work that mostly compiles.
    """

    name: str
    about: str
    seconds: float
    items: Callable[[], Sequence[Item]]
    workers: int = 0


def run_sections(
    sections: Sequence[Section],
    limit_seconds: float,
    finished: Callable[[list[SectionResult]], None],
    started: float | None = None,
    clock: Clock = time.monotonic,
) -> list[SectionResult]:
    """Run all sections and return what each did; `finished` gets the list so far after each of them.

    The shares are scaled to fill `limit_seconds`, counted from `started` (now for None), less a reserve: an item that
    runs when its section's time ends is not interrupted.
    """
    start = clock() if started is None else started
    scale = _USED_SHARE * limit_seconds / sum(section.seconds for section in sections)
    results: list[SectionResult] = []
    shares = 0.0
    for section in sections:
        shares += section.seconds * scale
        begin = clock()
        result = SectionResult(section.name, section.about)
        results.append(result)
        try:
            items = section.items()
        except Exception as error:  # noqa: BLE001  # recorded, and the next section runs
            result.failures.append(_failure("making the list of items", error))
        else:
            run = partial(_run_parallel, section.workers) if section.workers else _run_serial
            run(items, result, start + shares, clock)
        result.seconds = round(clock() - begin, 3)
        finished(results)
    return results


def _run_serial(items: Sequence[Item], result: SectionResult, end: float, clock: Clock) -> None:
    for item in items:
        if clock() >= end:
            result.not_run.append(item.name)
            continue
        try:
            result.records += item.run()
        except Exception as error:  # noqa: BLE001  # recorded, and the next item runs
            result.failures.append(_failure(item.name, error))


def _run_parallel(workers: int, items: Sequence[Item], result: SectionResult, end: float, clock: Clock) -> None:
    """Run items in fresh processes, which do not inherit this one's CUDA context; in the order of `items`."""
    pool = _pool(workers)
    waiting = list(items)[::-1]
    running: dict[Future[list[Record]], Item] = {}
    done: dict[str, Future[list[Record]]] = {}
    while (waiting and clock() < end) or running:
        while waiting and clock() < end and len(running) < workers:
            item = waiting.pop()
            try:
                running[pool.submit(item.run)] = item
            except BrokenExecutor:  # a process died; what ran beside it fails with that reason, too
                pool = _pool(workers)
                running[pool.submit(item.run)] = item
        for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
            done[running.pop(future).name] = future
    pool.shutdown()
    for item in items:  # results in the order of the items, whichever finished first
        if item.name not in done:
            result.not_run.append(item.name)
        elif (error := done[item.name].exception()) is not None:
            result.failures.append(_failure(item.name, error))
        else:
            result.records += done[item.name].result()


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_take_one_core)


def _take_one_core() -> None:
    torch.set_num_threads(1)


def _failure(item: str, error: BaseException) -> dict[str, str]:
    first = str(error).splitlines()[0] if str(error) else ""
    trace = "".join(traceback.format_exception(error))
    return {"item": item, "error": f"{type(error).__name__}: {first}", "traceback": trace[-6000:]}
