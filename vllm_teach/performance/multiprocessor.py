"""How many threads a GPU's multiprocessor holds at once, from what a kernel needs: registers, shared memory, block.

A multiprocessor hides the wait for memory behind other threads, so the number that it can hold matters. This is
arithmetic on NVIDIA's tables (CUDA C++ programming guide, technical specifications by compute capability), the same
that its occupancy calculator does; it says what fits, not how fast it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError

_WARP = 32
_REGISTERS_AT_ONCE = 256  # of a warp
_PARTS = 4  # of a multiprocessor, each with a quarter of the registers: a warp lies within one
_MOST_REGISTERS = 255  # of a thread
_MOST_BLOCK_THREADS = 1024
_SHARED_AT_ONCE = 128  # bytes
_SHARED_OF_THE_SYSTEM = 1024  # bytes of each thread block


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor has: 32-bit registers, threads, thread blocks, and bytes of shared memory."""

    name: str
    registers: int = 65_536
    threads: int = 2_048
    blocks: int = 32
    shared_bytes: int = 164 * 1024


MULTIPROCESSORS = {
    "sm_80": Multiprocessor("A100"),
    "sm_90": Multiprocessor("H100", shared_bytes=228 * 1024),
}


@dataclass(frozen=True)
class Residency:
    """How many thread blocks and threads fit, and which of the four runs out first."""

    blocks: int
    threads: int
    limited_by: str
    share: float


def resident_threads(registers: int, block_threads: int, shared_bytes: int = 0, arch: str = "sm_80") -> Residency:
    """Return how many threads of a kernel fit one multiprocessor of `arch`.

    `registers` are those of a thread, at most 255, `shared_bytes` those of a thread block of `block_threads` threads,
    at most 1,024. A warp gets registers by 256, from one of the multiprocessor's four parts. Raises
    InvalidArgumentError for another `arch`, for numbers below 1 and for a block that does not fit at all.
    """
    if arch not in MULTIPROCESSORS:
        raise InvalidArgumentError(f"arch is {arch!r}; choose one of {', '.join(MULTIPROCESSORS)}.")
    has = MULTIPROCESSORS[arch]
    registers = check_count("registers", registers, 1)
    warps = -(-check_count("block_threads", block_threads, 1) // _WARP)
    shared = _rounded(check_count("shared_bytes", shared_bytes, 0) + _SHARED_OF_THE_SYSTEM, _SHARED_AT_ONCE)
    fits = {
        "registers": has.registers // _PARTS // _rounded(registers * _WARP, _REGISTERS_AT_ONCE) * _PARTS // warps,
        "threads": has.threads // (warps * _WARP),
        "blocks": has.blocks,
        "shared memory": has.shared_bytes // shared,
    }
    blocks = min(fits.values())
    if blocks == 0 or registers > _MOST_REGISTERS or block_threads > _MOST_BLOCK_THREADS:
        raise InvalidArgumentError(
            f"block_threads is {block_threads} and needs more than one multiprocessor of an {has.name} has: "
            "take fewer threads, registers or bytes."
        )
    limit = "threads" if fits["threads"] == blocks else next(name for name, count in fits.items() if count == blocks)
    threads = blocks * warps * _WARP
    return Residency(blocks, threads, limit, threads / has.threads)


def _rounded(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
