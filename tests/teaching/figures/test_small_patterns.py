from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from vllm_teach.attention.patterns import Causal, LocalWindow, Strided, TileKind
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.small_patterns import draw_small_patterns

A, B = LocalWindow(2), Strided(3) & Causal()


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def fills(figure, colour: str) -> int:
    (axes,) = figure.axes
    return sum(to_hex(patch.get_facecolor()).upper() == colour for patch in axes.patches)


def test_masks_and_kinds() -> None:
    _, panels = draw_small_patterns("title", {"a": A, "a & b": A & B, "a | b": A | B}, 8, 8, 2)
    assert list(panels) == ["a", "a & b", "a | b"]
    assert panels["a"].keys_seen == (1, 2, 3, 3, 3, 3, 3, 3)
    assert torch.equal(panels["a & b"].mask, torch.eye(8, dtype=torch.bool))
    assert torch.equal(panels["a | b"].kinds, (A | B).tile_map(8, 8, 2, 2))
    assert [panels["a"].count(kind) for kind in (TileKind.EMPTY, TileKind.PARTIAL, TileKind.FULL)] == [9, 7, 0]


def test_as_many_cells_are_purple_as_pairs_are_seen() -> None:
    figure, panels = draw_small_patterns("title", {"a": A, "b": B}, 8, 8)
    assert fills(figure, style.colour("attention")) == int(panels["a"].mask.sum() + panels["b"].mask.sum()) == 21 + 15
    assert panels["a"].kinds is None
    assert panels["a"].count(TileKind.EMPTY) == 0


def test_as_many_tiles_are_drawn_full_as_there_are() -> None:
    figure, panels = draw_small_patterns("title", {"~a": ~A, "a | b": A | B}, 8, 8, 2)
    full = sum(panel.count(TileKind.FULL) for panel in panels.values())
    assert fills(figure, style.colour("done")) == full == 9 + 3


def test_fewer_queries_than_keys_and_a_short_last_tile() -> None:
    figure, panels = draw_small_patterns("title", {"a": A}, 3, 7, 2)
    assert panels["a"].kinds.shape == (2, 4)
    (axes,) = figure.axes
    right = max(patch.get_x() + patch.get_width() for patch in axes.patches)
    left = min(patch.get_x() for patch in axes.patches)
    cell = min(patch.get_width() for patch in axes.patches)
    assert right - left == pytest.approx(7 * cell)


def test_a_tile_must_be_positive() -> None:
    with pytest.raises(InvalidArgumentError, match="tile_q"):
        draw_small_patterns("title", {"a": A}, 4, 4, 0)
