"""Threads that fit a multiprocessor, against NVIDIA's occupancy calculator for a few cases, and by its definition."""

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.multiprocessor import resident_threads


@pytest.mark.parametrize(
    ("registers", "block", "shared", "threads", "limit"),
    [
        (32, 256, 0, 2048, "threads"),
        (33, 256, 0, 1536, "registers"),
        (36, 256, 1024, 1536, "registers"),
        (64, 256, 0, 1024, "registers"),
        (255, 256, 0, 256, "registers"),
        (32, 1024, 0, 2048, "threads"),
        (33, 1024, 0, 1024, "registers"),
        (16, 32, 0, 1024, "blocks"),
        (32, 256, 48 * 1024, 768, "shared memory"),
        (1, 33, 0, 2048, "threads"),
        (73, 32, 0, 768, "registers"),  # 6 warps in each of four parts: what is left over in them makes no 25th
        (33, 96, 0, 1536, "registers"),
    ],
)
def test_an_a100(registers: int, block: int, shared: int, threads: int, limit: str) -> None:
    found = resident_threads(registers, block, shared)
    assert (found.threads, found.limited_by) == (threads, limit)
    assert found.share == threads / 2048
    assert found.threads == found.blocks * -(-block // 32) * 32


def test_an_h100_has_more_shared_memory() -> None:
    assert resident_threads(32, 256, 48 * 1024, "sm_90").blocks == 4
    assert resident_threads(32, 256, 48 * 1024, "sm_80").blocks == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 256), "registers"),
        ((32, 0), "block_threads"),
        ((32, 256, -1), "shared_bytes"),
        ((32, 256, 0, "sm_20"), "arch is 'sm_20'; choose one of sm_80, sm_90"),
        ((255, 1024), "more than one multiprocessor of an A100 has"),
        ((16, 1025), "block_threads is 1025 and needs more"),
        ((256, 32), "take fewer threads, registers or bytes"),
        ((32, 256, 200 * 1024), "more than one multiprocessor"),
    ],
)
def test_what_does_not_fit(arguments: tuple, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        resident_threads(*arguments)
