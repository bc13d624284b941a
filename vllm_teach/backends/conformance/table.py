"""The table itself, one group of rows for each thing that has gone wrong in some attention kernel."""

from __future__ import annotations

from typing import Any

import torch

from vllm_teach.attention.patterns import (
    Banded,
    BlockSparsePattern,
    Causal,
    Documents,
    GlobalTokens,
    LocalWindow,
    Pattern,
    Strided,
)
from vllm_teach.backends.conformance.row import Row

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HALVES = ("fp16", "bf16")


def _dense(name: str, q_len: int, kv_len: int, dtype: str = "fp32", batch: int = 2, **options: Any) -> Row:
    return Row(f"{name} {dtype}", ((q_len, kv_len),) * batch, dtype=_DTYPES[dtype], **options)


def _lengths() -> list[Row]:
    """One query, one key, one row more than a tile, more keys than queries and the reverse; no key, no query."""
    pairs = [
        (1, 1), (1, 7), (7, 7), (64, 64), (128, 128), (129, 129), (1, 1111), (65, 257), (40, 150), (150, 40), (5, 1),
        (3, 0), (0, 3),
    ]  # fmt: skip
    rows = [_dense(f"causal {q}x{k}", q, k, head_dim=32) for q, k in pairs]
    rows += [_dense(f"full {q}x{k}", q, k, head_dim=32, causal=False) for q, k in ((1, 7), (65, 129), (70, 5), (3, 0))]
    return [*rows, _dense("causal 1111x1111", 1111, 1111, batch=1, heads=(1, 1))]


def _dtypes() -> list[Row]:
    rows = [_dense("causal 129x257", 129, 257, dtype) for dtype in ("fp64", *_HALVES)]
    rows += [_dense("causal 1x300", 1, 300, dtype, heads=(4, 1)) for dtype in ("fp64", *_HALVES)]
    rows += [_dense("full 70x130", 70, 130, dtype, causal=False) for dtype in _HALVES]
    return [*rows, _dense("causal 1111x1111", 1111, 1111, "bf16", batch=1, heads=(1, 1))]


def _head_sizes() -> list[Row]:
    sizes = (40, 80, 96, 128, 160, 256)
    rows = [_dense(f"head_dim {d}", 66, 130, "bf16", batch=1, head_dim=d) for d in sizes]
    return rows + [_dense(f"head_dim {d}", 66, 130, batch=1, head_dim=d) for d in (128, 256)]


def _head_groups() -> list[Row]:
    groups = [(1, 1), (3, 3), (6, 2), (8, 1), (9, 3)]
    return [_dense(f"heads {q} over {k}", 33, 65, heads=(q, k), head_dim=32) for q, k in groups]


def _windows() -> list[Row]:
    windows = [(16, 0), (0, 0), (8, 8), (0, 5), (-1, 3), (5, -1), (500, 0)]
    rows = [_dense(f"window {w}", 100, 150, head_dim=32, window_size=w, causal=False) for w in windows]
    rows += [
        _dense("window (16, 0) causal 150x40", 150, 40, head_dim=32, window_size=(16, 0)),
        _dense("window (16, 9) 150x40", 150, 40, head_dim=32, window_size=(16, 9), causal=False),
        _dense("window (16, 9) causal", 60, 60, head_dim=32, window_size=(16, 9)),
        _dense("window (40, 0) decode", 1, 300, head_dim=32, window_size=(40, 0)),
    ]
    return rows + [_dense("window (64, 0)", 300, 300, dtype, batch=1, window_size=(64, 0)) for dtype in _HALVES]


def _patterns() -> list[Row]:
    grid = BlockSparsePattern([[(3 * a + b) % 4 == 0 for b in range(5)] for a in range(5)], 32)
    patterns: dict[str, tuple[int, int, Pattern]] = {
        "sinks and window": (200, 200, Causal() & (GlobalTokens(4) | LocalWindow(30))),
        "global tokens": (90, 150, GlobalTokens(5, symmetric=True)),
        "banded": (130, 130, Banded(8, 4)),
        "strided": (100, 140, Causal() & Strided(7)),
        "documents": (150, 150, Causal() & Documents([0, 20, 20, 90, 150])),
        "block-sparse": (160, 160, grid),
        "block-sparse causal": (100, 160, grid & Causal()),
        "all but causal": (50, 50, ~Causal()),
        "nothing": (20, 30, LocalWindow(3) & ~LocalWindow(5)),
    }
    rows = [
        _dense(f"pattern {name}", q, k, head_dim=32, causal=False, pattern=pattern)
        for name, (q, k, pattern) in patterns.items()
    ]
    sinks = GlobalTokens(4) | LocalWindow(30)
    return rows + [_dense("pattern causal sinks", 140, 140, dtype, batch=1, pattern=sinks) for dtype in _HALVES]


def _scores() -> list[Row]:
    slope_kinds = ("heads", "sequences")
    rows = [_dense(f"softcap {cap}", 70, 130, softcap=cap, head_dim=32) for cap in (2.0, 30.0)]
    rows += [_dense("softcap 2.0", 70, 130, dtype, softcap=2.0, batch=1) for dtype in _HALVES]
    rows += [_dense(f"alibi of {kind}", 70, 130, alibi=kind, head_dim=32) for kind in slope_kinds]
    rows += [
        _dense("alibi full 130x70", 130, 70, alibi="heads", causal=False, head_dim=32),
        _dense("alibi decode", 1, 200, alibi="sequences", head_dim=32),
        _dense("alibi", 64, 64, "fp16", alibi="heads", batch=1),
        _dense("scale 0.3", 65, 65, scale=0.3, head_dim=32),
        _dense("scale -0.1", 65, 65, scale=-0.1, head_dim=32),
        _dense("softcap, alibi and window", 90, 120, softcap=5.0, alibi="heads", window_size=(40, 0), head_dim=32),
        _dense(
            "softcap, alibi and window", 40, 70, "fp64", softcap=5.0, alibi="heads", window_size=(9, 0), head_dim=32
        ),
    ]
    return rows


def _dropout() -> list[Row]:
    return [
        _dense("dropout 0.1", 70, 130, dropout_p=0.1, head_dim=32),
        _dense("dropout 0.5 full", 130, 70, dropout_p=0.5, causal=False, head_dim=32),
        _dense("dropout 0.1", 64, 64, "bf16", dropout_p=0.1, batch=1),
        _dense("dropout 0.3, window and alibi", 40, 70, "fp64", dropout_p=0.3, window_size=(20, 0), alibi="heads"),
    ]


_MIXED = ((5, 5), (0, 3), (17, 17), (1, 64), (9, 0), (3, 40), (40, 3), (0, 0))
_DECODE = ((1, 5), (1, 33), (1, 0), (1, 300), (1, 1))


def _varlen() -> list[Row]:
    def row(name: str, lengths: tuple[tuple[int, int], ...] = _MIXED, dtype: str = "fp32", **options: Any) -> Row:
        options.setdefault("head_dim", 32)
        return Row(f"varlen {name} {dtype}", lengths, dtype=_DTYPES[dtype], layout="varlen", **options)

    return [
        row("causal"),
        row("full", causal=False),
        *(row("causal", dtype=dtype, head_dim=64) for dtype in ("fp64", *_HALVES)),
        row("decode", _DECODE),
        row("one long", ((200, 200), (3, 3))),
        row("no token", ((0, 0),)),
        row("heads 8 over 1", heads=(8, 1)),
        row("window (6, 0)", window_size=(6, 0)),
        row("window (6, 2) full", window_size=(6, 2), causal=False),
        row("softcap 2.0", softcap=2.0),
        row("alibi of heads", alibi="heads"),
        row("alibi of sequences", alibi="sequences"),
        row("dropout 0.2", dropout_p=0.2),
        row("pattern sinks", pattern=GlobalTokens(2) | LocalWindow(4)),
    ]


def _paged() -> list[Row]:
    def row(
        name: str, block_size: int, lengths: tuple[tuple[int, int], ...] = _MIXED, dtype: str = "fp32", **options: Any
    ) -> Row:
        options.setdefault("head_dim", 32)
        full_name = f"paged {name}, blocks of {block_size} {dtype}"
        return Row(full_name, lengths, dtype=_DTYPES[dtype], layout="paged", block_size=block_size, **options)

    return [
        *(row("mixed", size) for size in (1, 3, 16, 256)),
        *(row("decode", size, _DECODE) for size in (1, 16, 256)),
        *(row("decode", 16, _DECODE, dtype, head_dim=64, heads=(8, 2)) for dtype in ("fp64", *_HALVES)),
        *(row("mixed", 256, _MIXED, dtype, head_dim=128) for dtype in _HALVES),
        row("mixed full", 16, causal=False),
        row("heads 9 over 3", 16, heads=(9, 3)),
        row("decode heads 8 over 1", 16, _DECODE, heads=(8, 1)),
        row("decode window (20, 0)", 16, _DECODE, window_size=(20, 0)),
        row("window (6, 0)", 16, window_size=(6, 0)),
        row("softcap 2.0", 16, softcap=2.0),
        row("alibi of sequences", 16, alibi="sequences"),
        row("dropout 0.2", 16, dropout_p=0.2),
        row("pattern sinks", 16, pattern=GlobalTokens(2) | LocalWindow(4)),
    ]


ROWS: tuple[Row, ...] = (
    *_lengths(),
    *_dtypes(),
    *_head_sizes(),
    *_head_groups(),
    *_windows(),
    *_patterns(),
    *_scores(),
    *_dropout(),
    *_varlen(),
    *_paged(),
)
