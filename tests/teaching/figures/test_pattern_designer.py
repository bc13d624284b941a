from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex

from vllm_teach.attention.patterns import BlockSparsePattern, Causal, Documents, GlobalTokens, LocalWindow, TileKind
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.pattern_designer import draw_pattern, pattern_data, share_seen

SINKS = GlobalTokens(4) | LocalWindow(15)


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


@pytest.mark.parametrize("n", [64, 61])
@pytest.mark.parametrize("pattern", [Causal(), SINKS, Documents([0, 20, 64]), ~Causal()], ids=repr)
def test_counts_follow_from_the_mask(pattern, n) -> None:
    data = pattern_data(pattern, n, 8)
    mask = pattern.mask(n, n)
    tiles = [mask[i : i + 8, j : j + 8] for i in range(0, n, 8) for j in range(0, n, 8)]
    assert torch.equal(data.mask, mask)
    assert data.density == pytest.approx(float(mask.double().mean()))
    assert data.visited == sum(bool(tile.any()) for tile in tiles)
    assert data.share == data.visited / len(tiles)
    assert data.count(TileKind.FULL) == sum(bool(tile.all()) for tile in tiles)
    assert data.computed == sum(tile.numel() for tile in tiles if tile.any())


def test_full_causal_attention_costs_one() -> None:
    assert pattern_data(Causal(), 61, 8).cost == 1
    # two tiles a row, but for the first, and the sinks' tile in the rows from the fourth on; causal: 8 · 9 / 2
    data = pattern_data(GlobalTokens(1) | LocalWindow(7), 64, 8)
    assert data.cost == pytest.approx((1 + 2 * 7 + 6) / 36)
    # pairs: 1 + … + 8 in the first tile of rows, then 8 a row, and key 0 for all but the first 8 rows
    assert data.density == (36 + 56 * 8 + 56) / 64**2
    assert data.describe() == (
        "density 13.2 %, 21 of 64 tiles visited (21 cut by the mask), 0.58 x the scores of full causal attention"
    )


def test_the_drawing_is_to_scale() -> None:
    figure, data = draw_pattern(SINKS, 61, 8, name="Sinks")
    mask, tiles = figure.axes
    (image,) = mask.images
    assert torch.equal(torch.tensor(image.get_array()) > 0.5, data.mask)
    assert image.get_extent() == [0, 61, 61, 0]
    drawn = {c.get_label(): c for c in tiles.collections if isinstance(c, PatchCollection)}
    assert {name: len(c.get_paths()) for name, c in drawn.items()} == {k: data.count(TileKind[k]) for k in drawn}
    assert set(drawn) == {"EMPTY", "PARTIAL", "FULL"}
    assert to_hex(drawn["FULL"].get_facecolor()[0]).upper() == style.colour("done")
    assert drawn["PARTIAL"].get_hatch()
    corners = {tuple(path.vertices[0]) for path in drawn["EMPTY"].get_paths()}
    assert corners == {(8.0 * k, 8.0 * q) for q, k in torch.nonzero(data.kinds == TileKind.EMPTY).tolist()}
    assert max(path.vertices.max() for c in drawn.values() for path in c.get_paths()) == 61
    for ax in (mask, tiles):
        assert (ax.get_xlim(), ax.get_ylim(), ax.get_aspect()) == ((0, 61), (61, 0), 1.0)


def test_titles_and_legend_say_the_numbers() -> None:
    figure, data = draw_pattern(SINKS, 64, 8, name="Sinks")
    title, written = figure.texts
    assert title.get_text() == f"Sinks: {data.cost:.2f} × the work of full causal attention"
    assert written.get_text() == repr(SINKS)
    mask, tiles = figure.axes
    assert f"{100 * data.density:.1f} %" in mask.get_title(loc="left")
    assert f"{100 * data.share:.1f} %" in tiles.get_title(loc="left")
    labels = [text.get_text() for text in tiles.get_legend().get_texts()]
    assert labels == [f"{kind.name.lower()}: {data.count(kind)}" for kind in (2, 1, 0) for kind in [TileKind(kind)]]
    unnamed, _ = draw_pattern(SINKS, 64, 8)
    assert unnamed.texts[0].get_text().startswith("0.")


@pytest.mark.parametrize("n", [5, 12, 13, 100])
def test_a_long_mask_is_averaged_into_cells(n) -> None:
    mask = (Causal() & BlockSparsePattern.random(5, 20, density=0.7)).mask(n, n)
    shares, end = share_seen(mask, 6)
    side = end // len(shares)
    assert len(shares) <= 6
    assert n <= end < n + side
    padded = torch.zeros(end, end)
    padded[:n, :n] = mask
    cells = [[padded[i : i + side, j : j + side].mean() for j in range(0, end, side)] for i in range(0, end, side)]
    assert torch.allclose(shares, torch.tensor(cells))


@pytest.mark.parametrize(("n", "tile"), [(0, 4), (4, 0), (4, 1.5)])
def test_what_cannot_be_drawn(n, tile) -> None:
    with pytest.raises(InvalidArgumentError, match=r"n is 0|tile_q is"):
        draw_pattern(Causal(), n, tile)
