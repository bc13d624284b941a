"""The sections of a run, the important ones first, and what share of the time each may take.

To measure something new, write a module with a function that returns items, and add a section here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.gpu import (
    article,
    ceilings,
    checks,
    decode,
    sparse,
    tiles,
    times,
)
from vllm_teach.validation.gpu.sections import Item, Section
from vllm_teach.validation.gpu.setting import Setting

Items = Callable[[Setting], Sequence[Item]]


def plan(setting: Setting, only: Sequence[str] | None = None) -> list[Section]:
    """Return the sections, all or those named in `only`; their seconds add up to 8 minutes less a reserve.

    Raises InvalidArgumentError for a name that is none.
    """

    def section(name: str, about: str, seconds: float, items: Items, workers: int = 0) -> Section:
        return Section(name, about, seconds, partial(items, setting), workers)

    sections = [
        section("ceilings", "what the GPU attains at best", 15, ceilings.ceiling_items),
        section("tiles", "every candidate tile is right", 110, checks.tile_items, setting.workers),
        section("attention", "the FlashAttention kernel beside others", 95, times.attention_items),
        section("article", "the articles' layer: 2,048 tokens, hidden size 2,048", 40, article.article_items),
        section("conformance", "every row of the conformance table", 90, checks.row_items, setting.workers),
        section("other checks", "softmax, determinism", 10, checks.other_items),
        section("decode", "one query per sequence over a paged cache", 40, decode.decode_items),
        section("density", "block-sparse patterns", 25, sparse.density_items),
        section("window", "local windows", 15, sparse.window_items),
        section("tile times", "what the tuning measured", 15, tiles.tile_time_items),
    ]
    if only is None:
        return sections
    names = [one.name for one in sections]
    for name in only:
        if name not in names:
            raise InvalidArgumentError(f"--only names {name!r}; the sections are {', '.join(names)}.")
    return [one for one in sections if one.name in only]
