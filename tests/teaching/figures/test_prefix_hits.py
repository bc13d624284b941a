import matplotlib.pyplot as plt
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.prefix_hits import draw_prefix_hits, prefix_hits


def test_what_is_left_to_compute_and_the_rate() -> None:
    data = prefix_hits([0, 16, 16], [20, 20, 24])
    assert data.computed == (20, 4, 8)
    assert data.hit_rate == 32 / 64


@pytest.mark.parametrize(
    ("cached", "lengths", "message"),
    [([0], [4, 4], "1 entries, lengths 2"), ([], [], "give as many, from one"), ([4], [4], "cap the hit")],
)
def test_what_cannot_be_is_refused(cached, lengths, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        prefix_hits(cached, lengths)


@pytest.mark.parametrize(
    ("in_vain", "below", "names"),
    [(False, "uncached", ["computed", "found in the cache"]), (True, "cached", ["new", "computed again"])],
)
def test_bars_are_stacked_to_the_prompts_length(in_vain, below, names) -> None:
    _, ax = plt.subplots()
    draw_prefix_hits(ax, prefix_hits([0, 16], [20, 24]), in_vain=in_vain)
    lower, upper = ax.containers
    assert [bar.get_height() for bar in lower] == [20, 8]
    assert [bar.get_y() + bar.get_height() for bar in upper] == [20, 24]
    assert lower[0].get_facecolor()[:3] == pytest.approx(
        tuple(int(style.colour(below)[i : i + 2], 16) / 255 for i in (1, 3, 5))
    )
    assert ax.get_legend_handles_labels()[1] == names
    plt.close()
