import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.memory_split import MemorySplit
from vllm_teach.teaching.figures.memory_split import PARTS, draw_memory_split

SPLITS = [MemorySplit("max (10)", 0.2, 0.1, 0.6, 0.1), MemorySplit("paged", 0.95, 0.02, 0.02, 0.01)]


def test_each_bar_is_the_whole_cache_in_its_parts() -> None:
    figure = draw_memory_split(SPLITS)
    ax = figure.axes[0]
    bars = [[bar.get_width() for bar in container] for container in ax.containers]
    assert bars == [[pytest.approx(100 * getattr(split, part[0])) for split in SPLITS] for part in PARTS]
    ends = [max(bar.get_x() + bar.get_width() for bar in row) for row in zip(*ax.containers, strict=True)]
    assert ends == pytest.approx([100, 100])
    assert [text.get_text() for text in ax.texts] == ["20 %", "95 %"]
    assert ax.get_title() + ax.get_title(loc="left") == "From 20 to 95 % of the memory hold a token"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["max (10)", "paged"]
    plt.close(figure)


def test_the_first_is_at_the_top_and_may_be_named() -> None:
    figure = draw_memory_split(SPLITS, ["reserved", "in blocks"])
    ax = figure.axes[0]
    assert ax.yaxis_inverted()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["reserved", "in blocks"]
    plt.close(figure)


@pytest.mark.parametrize(("splits", "names"), [([], None), (SPLITS, ["one"])])
def test_what_cannot_be_drawn_is_refused(splits: list[MemorySplit], names: list[str] | None) -> None:
    with pytest.raises(InvalidArgumentError, match="give as many, and one"):
        draw_memory_split(splits, names)
