import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.crossover import crossovers, draw_crossovers

LENGTHS = (128, 512, 2048)


def timed(first: list[float], second: list[float]) -> dict[int, dict[str, float]]:
    return {n: {"naive": a, "tiled": b} for n, a, b in zip(LENGTHS, first, second, strict=True)}


def test_a_power_law_crosses_where_it_should() -> None:
    square = [1e-9 * n**2 for n in LENGTHS]
    line = [1e-9 * n * 700 for n in LENGTHS]
    data = crossovers("naive", "tiled", {"a": timed(square, line)})
    assert data.crossing("a") == pytest.approx(700)
    assert data.describe("a") == "tiled is ahead from 700 tokens on"


def test_the_last_crossing_counts() -> None:
    data = crossovers("naive", "tiled", {"a": timed([2, 1, 4], [1, 2, 1])})
    assert 512 < data.crossing("a") < 2048


def test_no_crossing() -> None:
    data = crossovers("naive", "tiled", {"never": timed([1, 1, 1], [2, 2, 1]), "always": timed([3, 3, 3], [1, 2, 1])})
    assert data.crossing("never") is None
    assert data.crossing("always") == 0
    assert data.describe("never") == "naive stays ahead"
    assert data.describe("always") == "tiled is always ahead"


def test_lengths_that_lack_one_are_left_out() -> None:
    partial = timed([1, 2, 3], [3, 2, 1])
    del partial[512]["tiled"]
    assert list(crossovers("naive", "tiled", {"a": partial}).ratio["a"]) == [128, 2048]
    del partial[128]["naive"]
    with pytest.raises(InvalidArgumentError, match="at 1 lengths"):
        crossovers("naive", "tiled", {"a": partial})


def test_the_figure_shows_ratio_threshold_and_crossing() -> None:
    data = crossovers("naive", "tiled", {"a": timed([1, 2, 4], [2, 2.5, 1])})
    figure, ax = plt.subplots()
    draw_crossovers(ax, data)
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["a"].get_ydata()) == list(data.ratio["a"].values())
    assert list(lines["the articles' 1,024"].get_xdata()) == [1024, 1024]
    rings = [line for line in ax.lines if list(line.get_xdata()) == [data.crossing("a")]]
    assert len(rings) == 1
    assert ax.get_xscale() == ax.get_yscale() == "log"
    plt.close(figure)
