"""Which tile a kernel works with: a default for every case, candidates, and the choice between them by the clock.

`triton.autotune` does the same with a decorator. This is one screen of it in plain sight, because here the choice can
be read, recorded and turned off, a candidate that does not fit the GPU is named, and the candidates are timed on a
workload of their own: which call happened to come first does not decide.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from . import INTERPRETED
from .tile_math import padded

if TYPE_CHECKING:
    from .problem import Problem

SWITCH = "VLLM_TEACH_TRITON_TUNE"


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, the warps of 32 threads that work on it, and how many loads are under way at once."""

    q: int
    k: int
    warps: int = 4
    stages: int = 2

    def launch(self) -> dict[str, int]:
        """Return what a kernel's launch takes beside its arguments."""
        return {"TILE_Q": self.q, "TILE_K": self.k, "num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        return f"{self.q}x{self.k}, {self.warps} warps, {self.stages} stages"


# By kernel, bytes of an element and padded head_dim, the default first: it fits the 99 KiB of a consumer GPU, the next
# ones the 163 KiB of an A100 or the 227 KiB of an H100. 128x128 is what the articles advise for an A100; FlashAttention
# 2 takes 128x64 there for head_dim 128. Float32 is computed without tensor cores, from registers: small tiles.
_FORWARD = {
    (2, 64): (Tile(128, 64, 4, 3), Tile(128, 128, 4, 3), Tile(128, 128, 8, 3), Tile(64, 64, 4, 3)),
    (2, 128): (Tile(128, 64, 8, 2), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    (2, 256): (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)),
    (4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    (4, 128): (Tile(64, 16, 8, 1), Tile(32, 16, 4, 1)),
    (4, 256): (Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
}
_BACKWARD_KEYS = {  # one program holds a tile of keys and goes over the queries
    (2, 64): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2)),
    (2, 128): (Tile(32, 64, 4, 2), Tile(64, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 128, 8, 2)),
    (2, 256): (Tile(16, 32, 4, 1), Tile(32, 64, 8, 1)),
    (4, 64): (Tile(32, 32, 4, 1), Tile(32, 64, 8, 1)),
    (4, 128): (Tile(16, 32, 4, 1), Tile(32, 32, 8, 1)),
    (4, 256): (Tile(16, 16, 4, 1),),
}
_BACKWARD_QUERIES = {  # one program holds a tile of queries and goes over the keys
    (2, 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2)),
    (2, 128): (Tile(64, 32, 4, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
    (2, 256): (Tile(32, 16, 4, 1), Tile(64, 32, 8, 1)),
    (4, 64): (Tile(32, 32, 4, 1), Tile(64, 32, 8, 1)),
    (4, 128): (Tile(32, 16, 4, 1), Tile(32, 32, 8, 1)),
    (4, 256): (Tile(16, 16, 4, 1),),
}
_SPARSE = {
    (2, 64): (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2)),
    (2, 128): (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2)),
    (2, 256): (Tile(64, 32, 8, 2), Tile(128, 64, 8, 2)),
    (4, 64): (Tile(64, 32, 8, 2),),
    (4, 128): (Tile(64, 16, 8, 1),),
    (4, 256): (Tile(32, 16, 8, 1),),
}
_PAGED = {  # q: the rows of a program, one for each query and each head that shares the keys
    (2, 64): (Tile(16, 64, 4, 3), Tile(16, 128, 4, 3)),
    (2, 128): (Tile(16, 64, 4, 2), Tile(16, 128, 4, 2), Tile(16, 32, 4, 3)),
    (2, 256): (Tile(16, 32, 4, 2), Tile(16, 64, 4, 2)),
    (4, 64): (Tile(16, 32, 4, 2),),
    (4, 128): (Tile(16, 32, 4, 1),),
    (4, 256): (Tile(16, 16, 4, 1),),
}
_TABLES = {
    "forward": _FORWARD,
    "backward_keys": _BACKWARD_KEYS,
    "backward_queries": _BACKWARD_QUERIES,
    "block_sparse": _SPARSE,
    "paged": _PAGED,
}
# Small and oblong, so that little tensors have several tiles and a mix-up of the two sides shows.
_IN_THE_INTERPRETER = Tile(64, 32)
_DOES_NOT_FIT = (OutOfResources, PTXASError)


def candidate_table() -> dict[str, dict[tuple[int, int], tuple[Tile, ...]]]:
    """Return all candidates: by kernel, then by (bytes of an element, padded head_dim)."""
    return _TABLES


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles to choose from, the default first; only one in Triton's interpreter, which has no clock."""
    if INTERPRETED:
        return (_IN_THE_INTERPRETER,)
    return _TABLES[kernel][dtype.itemsize, max(64, padded(head_dim))]


@dataclass(frozen=True)
class Choice:
    """What was tried for one case: milliseconds by tile, or why the tile does not fit the GPU; and the tile chosen."""

    kernel: str
    gpu: str
    dtype: str
    head_dim: int
    causal: bool
    tried: dict[Tile, float | str]
    tile: Tile


_choices: dict[tuple[object, ...], Choice] = {}


def choices() -> list[Choice]:
    """Return all choices that this process has made by the clock."""
    return list(_choices.values())


def choose(kernel: str, problem: "Problem", prepare: Callable[["Problem"], Callable[[Tile], object]]) -> Tile:
    """Return the tile for a call of `kernel`: the fastest candidate for its (GPU, dtype, head_dim, causal or not).

    `prepare` makes, of a problem, what runs the kernel on it with a tile. The first call of a case compiles and times
    each candidate, which takes seconds; VLLM_TEACH_TRITON_TUNE=0 in the environment takes the default instead.
    """
    tiles = candidates(kernel, problem.head_dim, problem.q.dtype)
    if len(tiles) == 1 or os.environ.get(SWITCH) == "0":
        return tiles[0]
    gpu = torch.cuda.get_device_name(problem.q.device)
    case = (gpu, str(problem.q.dtype), problem.head_dim, problem.banded)
    if (kernel, *case) not in _choices:
        run = prepare(_workload(problem))
        tried = {tile: milliseconds(run, tile) for tile in tiles}
        times = {tile: ms for tile, ms in tried.items() if isinstance(ms, float)}
        _choices[kernel, *case] = Choice(kernel, *case, tried, min(times, key=times.__getitem__, default=tiles[0]))
    return _choices[kernel, *case].tile


def _workload(like: "Problem") -> "Problem":
    """A problem of `like`'s dtype and head_dim that fills any GPU: 2 sequences of 4,096 tokens, 16 heads."""
    shape, device = (2 * 4096, 16, like.head_dim), like.q.device
    generator = torch.Generator(device).manual_seed(0)  # its own: the caller's random numbers stay what they were
    q, k, v = (torch.randn(shape, dtype=like.q.dtype, device=device, generator=generator) for _ in range(3))
    options = replace(
        like.options, scale=None, left=-1, right=0 if like.banded else -1, softcap=0.0, slopes=None, dropout_p=0.0
    )
    return replace(like, q=q, k=k, v=v, batch=2, q_len=4096, kv_len=4096, lengths=None, options=options)


def milliseconds(run: Callable[[Tile], object], tile: Tile) -> float | str:
    """Return the median time of `run(tile)` on the GPU, or why the tile does not fit it."""
    try:
        return float(triton.testing.do_bench(lambda: run(tile), warmup=10, rep=50, return_mode="median"))
    except _DOES_NOT_FIT as error:  # ptxas' error carries the whole program
        lines = str(error).splitlines()
        return next((line for line in lines if "fatal" in line), lines[0])
