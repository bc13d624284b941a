from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.softmax_precision import draw_growing_sum, draw_statistics_error, statistics_error


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_a_sum_of_ones_stops_where_its_dtype_rounds_them_away():
    _, axes = plt.subplots()
    data = draw_growing_sum(axes, 4096)
    assert data.l["float32"] == data.keys
    assert data.l["float16"][-1] == 2048
    assert data.l["bfloat16"] == tuple(min(keys, 256) for keys in data.keys)
    drawn = {line.get_label(): tuple(line.get_ydata()) for line in axes.lines}
    assert drawn["kept in float16"] == data.l["float16"]


def test_the_error_follows_the_dtype():
    data = statistics_error([64, 256], queries=4, head_dim=16, tile=32)
    assert data.error["float32"][-1] < data.rounding[-1] < data.error["float16"][-1] < data.error["bfloat16"][-1]
    assert data.error["float32"][-1] < 1e-5
    _, axes = plt.subplots()
    draw_statistics_error(axes, data)
    drawn = {line.get_label(): tuple(line.get_ydata()) for line in axes.lines}
    assert drawn["computed in float16"] == data.error["float16"]
    assert drawn["only the output in float16"] == data.rounding
