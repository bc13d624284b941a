import pytest
from matplotlib import pyplot as plt

from vllm_teach import backends
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.backend_times import MARKERS, backend_times, draw_backend_times

TIMED = {128: {"naive": 1.0, "tiled": 2.0}, 512: {"naive": 16.0, "tiled": 8.0, "sdpa": 4.0}}


def test_the_fastest_and_the_spread_at_each_size() -> None:
    data = backend_times(TIMED)
    assert data.sizes == (128, 512)
    assert [data.fastest(size) for size in data.sizes] == ["naive", "sdpa"]
    assert [data.spread(size) for size in data.sizes] == [2.0, 4.0]
    assert list(data.at(512)) == ["sdpa", "tiled", "naive"]
    assert data.seconds["sdpa"] == {512: 4.0}


def test_a_size_without_a_time_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match=r"timed\[64\] is empty"):
        backend_times({64: {}})


def test_a_line_per_backend_and_a_ring_per_size() -> None:
    figure, ax = plt.subplots()
    draw_backend_times(ax, backend_times(TIMED), "queries", "tokens")
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {"naive", "tiled", "sdpa", "fastest"}
    assert list(lines["tiled"].get_ydata()) == [2.0, 8.0]
    assert list(lines["sdpa"].get_xdata()) == [512]
    assert list(lines["fastest"].get_ydata()) == [1.0, 4.0]
    assert ax.get_xscale() == ax.get_yscale() == "log"
    plt.close(figure)


def test_every_backend_has_a_colour_and_a_mark_of_its_own() -> None:
    names = backends.names()
    assert set(names) <= set(MARKERS)
    assert len({MARKERS[name] for name in names}) == len({style.colour(name) for name in names}) == len(names)
