from collections.abc import Iterator

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.machine import Machine, Rate
from vllm_teach.performance.roofline import Point
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.roofline import draw_roofline, roofline_data

MACHINE = Machine(
    device="cpu",
    name="imagined",
    threads=2,
    torch_version="2",
    matmul={"float32": Rate(200e9, 190e9, 210e9, 5)},
    skipped={},
    read_bandwidth=Rate(50e9, 45e9, 55e9, 5),
    copy_bandwidth=Rate(40e9, 40e9, 40e9, 5),
    caches={},
)
POINTS = [Point("naive", 1.0, 25e9, "naive"), Point("tiled", 40.0, 50e9, "tiled")]


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_points_are_set_against_the_roof_above_them() -> None:
    data = roofline_data(MACHINE, POINTS)
    assert data.ridge == 4.0
    assert data.share_of_roof == {"naive": 0.5, "tiled": 0.25}
    assert data.limited_by == {"naive": "memory", "tiled": "arithmetic"}


def test_the_drawn_roof_bends_at_the_ridge_and_the_points_lie_where_they_should() -> None:
    _, ax = plt.subplots()
    draw_roofline(ax, MACHINE, POINTS)
    roof = ax.lines[0].get_xydata()
    np.testing.assert_allclose(roof[1], [4.0, 200e9])
    np.testing.assert_allclose(roof[0][1] / roof[0][0], 50e9)
    assert roof[2][1] == 200e9
    drawn = {
        line.get_label(): (tuple(line.get_xydata()[0]), line.get_color())
        for line in ax.lines
        if line.get_marker() == "o"
    }
    assert drawn == {p.name: ((p.intensity, p.flops_per_second), style.colour(p.concept)) for p in POINTS}
    low, high = ax.get_xlim()
    assert low < 1.0
    assert high > 40.0


def test_the_label_of_the_memory_roof_runs_along_it() -> None:
    figure, ax = plt.subplots()
    draw_roofline(ax, MACHINE, POINTS)
    figure.draw_without_rendering()
    (x0, y0), (x1, y1) = ax.transData.transform(ax.lines[0].get_xydata()[:2])
    label = next(text for text in ax.texts if text.get_text().startswith("memory"))
    assert label.get_text() == "memory: 50 GB/s"
    assert label.get_rotation() == pytest.approx(np.degrees(np.arctan2(y1 - y0, x1 - x0)), abs=2)


def test_axes_are_labelled_with_units_and_scale() -> None:
    _, ax = plt.subplots()
    draw_roofline(ax, MACHINE, [])
    assert ax.get_xlabel() == "arithmetic intensity (FLOP per byte moved, log scale)"
    assert ax.get_ylabel() == "rate (FLOP/s, log scale)"


def test_an_unmeasured_dtype_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'bfloat16' was not measured"):
        roofline_data(MACHINE, POINTS, dtype="bfloat16")
