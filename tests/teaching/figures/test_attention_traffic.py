from collections.abc import Iterator

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from vllm_teach.attention.traffic import naive_traffic, tiled_traffic, working_set_bytes
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.attention_growth import draw_growth, growth
from vllm_teach.teaching.figures.attention_matrices import draw_matrices
from vllm_teach.teaching.figures.attention_traffic import draw_traffic_by_length, draw_traffic_by_tile

HEAD = {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "input_bytes": 2}


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_matrices_add_up_to_what_naive_attention_moves():
    _, data = draw_matrices(4096, 64)
    assert data.moved == naive_traffic(**HEAD, q_len=4096, kv_len=4096).bytes_moved
    assert data.asked_for == 4 * 4096 * 64 * 2
    assert data.share_of_scores == pytest.approx(0.9846, abs=1e-4)


def test_matrices_are_drawn_to_scale():
    figure, _ = draw_matrices(1024, 64)
    shapes = [(p.get_width(), p.get_height()) for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    squares = [w for w, h in shapes if w == h]
    strips = [min(shape) / max(shape) for shape in shapes if shape[0] != shape[1]]
    assert len(squares) == 2
    assert strips == [pytest.approx(64 / 1024)] * 4


def test_bytes_by_length_are_the_counted_ones():
    _, axes = plt.subplots()
    data = draw_traffic_by_length(axes, [512, 1024, 2048], (128, 64))
    expected = tiled_traffic(**HEAD, q_len=2048, kv_len=2048, causal=True, tile_q=128, tile_k=64).bytes_moved
    assert data.tiled[-1] == expected
    assert data.slope("naive") == pytest.approx(2, abs=0.1)
    assert data.slope("least") == pytest.approx(1)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["naive"] == list(data.naive)
    assert drawn["tiled, 128 × 64"] == list(data.tiled)


def test_bytes_by_tile_fall_until_the_tile_spills():
    _, axes = plt.subplots()
    fast = {102_400: "100 KiB", 232_448: "227 KiB"}
    data = draw_traffic_by_tile(axes, 1024, [32, 64, 128, 256, 512], 64, fast)
    assert (data.best(102_400), data.best(232_448)) == (128, 256)
    assert data.moved[102_400][3] > data.naive > data.moved[102_400][2]
    edge = data.largest_tile(102_400)
    assert working_set_bytes(int(edge), 64, 64, 2) <= 102_400 < working_set_bytes(int(edge) + 1, 64, 64, 2)
    limits = sorted(line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":")
    np.testing.assert_allclose(limits, [edge, data.largest_tile(232_448)])


def test_growth_slopes_and_ratios():
    data = growth([100, 200, 400], {"naive": [1.0, 4.0, 16.0], "tiled": [30.0, 40.0, 60.0]})
    assert data.slope("naive") == pytest.approx(2)
    assert data.slope("tiled") < 1
    assert data.per_token("tiled") == pytest.approx(0.1)
    assert data.ratio("naive", "tiled") == pytest.approx(16 / 60)
    _, axes = plt.subplots()
    draw_growth(axes, data, "time per call", "seconds")
    assert [(line.get_label(), list(line.get_ydata())) for line in axes.lines] == [
        (name, list(values)) for name, values in data.costs.items()
    ]
    assert axes.get_ylabel() == "time per call (log scale)"


def test_growth_refuses_what_has_no_slope():
    with pytest.raises(InvalidArgumentError, match="lengths has 1"):
        growth([100], {"naive": [1.0]})
    with pytest.raises(InvalidArgumentError, match=r"costs\['naive'\] has 1"):
        growth([100, 200], {"naive": [1.0]})
