import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.shares import LLAMA2_7B, SMOLLM2_135M, Share, flop_share
from vllm_teach.teaching.figures.attention_share import crossing, draw_flop_shares, draw_measured_shares


def share(n: int, time: float, memory: float) -> Share:
    return Share(n, time, 0.0, 0.0, memory, 0.0, 0, 0)


def test_crossing_lies_between_the_sizes_around_it() -> None:
    shares = {256: 0.2, 1024: 0.6, 4096: 0.8}
    assert crossing(shares, 0.4) == pytest.approx(512)  # half way over log n
    assert crossing(shares, 0.6) == pytest.approx(1024)
    assert crossing(shares, 0.9) is None
    assert crossing(shares, 0.1) == 256


def test_the_figure_holds_shares_claims_and_the_flop_baseline() -> None:
    shares = [share(256, 0.1, 0.7), share(1024, 0.4, 0.9), share(4096, 0.8, 0.95)]
    wide = {"wide": share(1024, 0.2, 0.8)}
    figure, data = draw_measured_shares(
        shares, SMOLLM2_135M, time_claim=(2048, 0.68), memory_claim=(2048, 0.75), others=wide
    )
    (ax,) = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    drawn_colours = {line.get_label(): line.get_color() for line in ax.lines}
    assert drawn["time, measured"] == [0.1, 0.4, 0.8]
    assert drawn["peak memory, measured"] == [0.7, 0.9, 0.95]
    assert drawn["FLOPs, exact (baseline)"] == [flop_share(n, SMOLLM2_135M) for n in (256, 1024, 4096)]
    (tick,) = [line for line in ax.lines if line.get_label() == "claimed: time, 68%"]
    assert list(tick.get_ydata()) == [0.68, 0.68]
    assert tick.get_xdata()[0] < 2048 < tick.get_xdata()[1]
    assert tick.get_color() == drawn_colours["time, measured"] != drawn_colours["peak memory, measured"]
    assert [0.2] in drawn.values()
    assert 1024 < data.time_crossing < 4096
    assert 256 < data.memory_crossing < 1024
    plt.close(figure)


def test_flop_curves_cross_the_claim_where_they_say() -> None:
    shapes = {"small": SMOLLM2_135M, "large": LLAMA2_7B}
    figure, crossings = draw_flop_shares(shapes, claim=(2048, 0.68))
    for name, n in crossings.items():
        assert flop_share(round(n), shapes[name]) == pytest.approx(0.68, abs=1e-4)
    assert crossings["small"] == pytest.approx(6528)
    assert crossings["large"] > 8 * crossings["small"]
    plt.close(figure)


def test_more_shapes_than_shades() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 3"):
        draw_flop_shares(dict.fromkeys("abcd", SMOLLM2_135M), claim=(2048, 0.68))
