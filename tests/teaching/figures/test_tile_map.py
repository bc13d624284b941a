from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import PatchCollection

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.tile_map import bar_ends, draw_tile_map, tile_map


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


@pytest.mark.parametrize(
    ("q_len", "kv_len", "tile_q", "tile_k"),
    [(8, 8, 2, 2), (8, 8, 4, 2), (7, 7, 3, 2), (3, 9, 2, 4), (9, 4, 2, 3), (1, 5, 4, 2), (6, 6, 8, 8)],
)
def test_kinds_of_tiles_follow_from_the_mask(q_len, kv_len, tile_q, tile_k):
    data = tile_map(q_len, kv_len, tile_q, tile_k)

    def visible(tile):
        q0, q1, k0, k1 = tile
        return [key <= query + kv_len - q_len for query in range(q0, q1) for key in range(k0, k1)]

    assert all(all(visible(tile)) for tile in data.whole)
    assert all(any(visible(tile)) and not all(visible(tile)) for tile in data.cut)
    assert not any(any(visible(tile)) for tile in data.skipped)
    every = (*data.whole, *data.cut, *data.skipped)
    pairs = {(query, key) for q0, q1, k0, k1 in every for query in range(q0, q1) for key in range(k0, k1)}
    assert len(pairs) == q_len * kv_len == sum(len(visible(tile)) for tile in every)
    assert data.needed == sum(sum(visible(tile)) for tile in every)


def test_the_lessons_two_tiles():
    small, large = tile_map(1024, 1024, 128, 64), tile_map(1024, 1024, 256, 256)
    assert (len(small.whole), len(small.cut), len(small.skipped)) == (56, 16, 56)
    assert small.fits
    assert not large.fits
    assert small.bytes_moved < small.naive_bytes < large.bytes_moved
    assert "72 of 128 tiles visited (16 cut by the mask)" in small.describe()
    assert large.describe().endswith("does not fit: spills")


def test_the_drawing_is_to_scale():
    data = tile_map(8, 16, 4, 4)
    figure = draw_tile_map(data)
    matrix, needed, moved = figure.axes
    collections = [c for c in matrix.collections if isinstance(c, PatchCollection)]
    assert [len(c.get_paths()) for c in collections] == [data.visited, len(data.skipped)]
    assert matrix.get_xlim() == (0, 16)
    assert matrix.get_ylim() == (8, 0)
    assert matrix.get_aspect() == 1.0
    assert [bar.get_width() for c in needed.containers for bar in c] == [data.working_set]
    assert [bar.get_width() for c in moved.containers for bar in c] == [data.naive_bytes, data.bytes_moved]


def test_settings_of_a_slider_share_the_scale_of_their_bars():
    maps = [tile_map(1024, 1024, side, side) for side in (32, 128, 256)]
    ends = bar_ends(maps)
    assert ends.working_set == max(one.working_set for one in maps)
    assert ends.bytes_moved == max(one.bytes_moved for one in maps)
    for data in maps:
        _, needed, moved = draw_tile_map(data, ends).axes
        assert needed.get_xlim() == pytest.approx((0, 1.06 * ends.working_set))
        assert moved.get_xlim() == pytest.approx((0, 1.06 * ends.bytes_moved))
        assert len(needed.get_xticks()) >= 3
        assert len(moved.get_xticks()) >= 3


def test_one_picture_alone_still_shows_the_limit_and_naive():
    ends = bar_ends([tile_map(1024, 1024, 32, 32)])
    assert ends.working_set == 102_400
    assert ends.bytes_moved == tile_map(1024, 1024, 32, 32).naive_bytes
