from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.break_even import break_even, draw_break_even


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_by_hand() -> None:
    """1,000 FLOP/s, 10 bytes/s, 2 bytes: 4 bytes take 0.4 s, and 2 d FLOPs as long at d = 200."""
    data = break_even([50, 200, 400], flops_per_second=1000, bytes_per_second=10, input_bytes=2)
    assert data.keep == pytest.approx(0.4)
    assert data.recompute == pytest.approx((0.1, 0.4, 0.8))
    assert data.even == pytest.approx(200)
    assert data.ratio(50) == pytest.approx(4)
    assert data.ratio(400) == pytest.approx(0.5)


def test_the_lines_cross_where_the_data_says() -> None:
    data = break_even([16, 64, 256, 1024], flops_per_second=312e12, bytes_per_second=1555e9, input_bytes=2)
    _, axes = plt.subplots()
    draw_break_even(axes, data)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["compute it again"] == pytest.approx([seconds * 1e12 for seconds in data.recompute])
    assert drawn["write it, read it back"] == pytest.approx([data.keep * 1e12] * 4)
    assert any(list(line.get_xdata()) == [data.even, data.even] for line in axes.lines)


def test_a_crossing_outside_the_picture_is_not_drawn() -> None:
    _, axes = plt.subplots()
    draw_break_even(axes, break_even([16, 64], flops_per_second=312e12, bytes_per_second=1555e9, input_bytes=2))
    assert len(axes.lines) == 2


@pytest.mark.parametrize(
    "wrong", [{"flops_per_second": 0}, {"bytes_per_second": -1}, {"input_bytes": 0}, {"head_dims": []}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    settings: dict[str, object] = {
        "head_dims": [64],
        "flops_per_second": 1.0,
        "bytes_per_second": 1.0,
        "input_bytes": 2,
    }
    with pytest.raises(InvalidArgumentError):
        break_even(**(settings | wrong))  # type: ignore[arg-type]
