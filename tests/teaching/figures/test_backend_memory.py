import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.backend_memory import draw_backend_memory

PEAK = {"causal": {"naive": 800, "sdpa": 20}, "window": {"naive": 800, "sdpa": 300}}


def test_ratios_and_bars() -> None:
    figure, data = draw_backend_memory(PEAK, "a title")
    assert data.ratio("sdpa", "window", "causal") == 15
    assert data.ratio("naive", "window", "causal") == 1
    assert data.over("naive", "sdpa", "causal") == 40
    (ax,) = figure.axes
    assert sorted(bar.get_width() for container in ax.containers for bar in container) == [20, 300, 800, 800]
    assert ax.get_xscale() == "linear"
    assert ax.get_xlim()[0] == 0
    texts = [text.get_text() for text in ax.texts]
    assert "window: 300 B" in texts
    plt.close(figure)


@pytest.mark.parametrize(
    "peak", [{"causal": {"naive": 1}}, {"a": {"naive": 1}, "b": {"sdpa": 1}}, {}], ids=["one", "others", "none"]
)
def test_two_calls_with_the_same_backends(peak: dict[str, dict[str, int]]) -> None:
    with pytest.raises(InvalidArgumentError, match="give two"):
        draw_backend_memory(peak, "a title")
