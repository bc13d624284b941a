"""What ranks tell one another before they connect."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from vllm_teach.errors import EngineDeadError, InvalidArgumentError, ModelNotFoundError
from vllm_teach.parallel.meeting import excuse, meet


def together(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what `function` does, or the error that it raises, for each rank at the same time."""

    def run(rank: int) -> Any:
        try:
            return function(rank)
        except Exception as error:  # noqa: BLE001 - it is looked at
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_all_wait_for_who_still_loads(kind: str, tmp_path: Path) -> None:
    shared = dist.HashStore()

    def rank(number: int) -> float:
        store = shared if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 3)
        time.sleep(0.3 * (number == 1))
        meet(store, number, 3, "a model", 20.0)
        return time.monotonic()

    times = together(3, rank)
    assert max(times) - min(times) < 0.25, "nobody goes on before the last is there"


def test_an_excuse_is_everybodys_error_of_its_own_kind() -> None:
    store = dist.HashStore()

    def rank(number: int) -> None:
        if number == 1:
            excuse(store, 1, ModelNotFoundError("/m is no model directory: check the path."))
        else:
            meet(store, number, 3, "a model", 20.0)

    for error in together(3, rank)[::2]:
        assert type(error) is ModelNotFoundError
        assert str(error) == "rank 1: /m is no model directory: check the path."


def test_who_says_nothing_is_given_up() -> None:
    with pytest.raises(EngineDeadError, match=r"^rank 0 of 2 heard nothing of rank 1 in 0\.2 s: see"):
        meet(dist.HashStore(), 0, 2, "a model", 0.2)


def test_ranks_with_different_models_do_not_compute_together() -> None:
    store = dist.HashStore()
    for error in together(2, lambda number: meet(store, number, 2, f"model {number}", 20.0)):
        assert isinstance(error, InvalidArgumentError)
        assert "rank 0 has model 0" in str(error)
        assert "rank 1 has model 1" in str(error)


def test_a_second_meeting_is_refused() -> None:
    store = dist.HashStore()
    meet(store, 0, 1, "a model", 1.0)
    with pytest.raises(InvalidArgumentError, match="tensor_parallel_size=1 was asked for before"):
        meet(store, 0, 1, "a model", 1.0)
