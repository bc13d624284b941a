import matplotlib.pyplot as plt
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.hit_rates import draw_hit_rates, hit_rates

LINES = {"hash, small": [0.1, 0.2], "radix, small": [0.15, 0.1], "hash, large": [0.3, 0.4]}


def test_best_and_at() -> None:
    data = hit_rates([16, 32], LINES, 0.5)
    assert (data.best(16), data.best(32), data.at("radix, small", 32)) == ("hash, large", "hash, large", 0.1)


@pytest.mark.parametrize(("rates", "message"), [({"lru": [0.1]}, "1 values for 2"), ({"lru": [0.1, 0.6]}, "exceeds")])
def test_what_cannot_be_is_refused(rates, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        hit_rates([1, 2], rates, 0.5)


def test_one_colour_a_concept_and_the_ceiling_in_sight() -> None:
    figure, axes = plt.subplots(1, 2, sharey=True)
    for ax, ceiling in zip(axes, (0.5, 0.45), strict=True):
        draw_hit_rates(ax, hit_rates([16, 32], LINES, ceiling), "cache", "blocks")
    first, second, third, top = axes[0].lines
    assert (first.get_color(), second.get_color()) == (style.colour("hash"), style.colour("radix"))
    assert (first.get_linestyle(), third.get_linestyle(), third.get_color()) == ("-", "--", first.get_color())
    assert list(third.get_ydata()) == [30, 40]
    assert axes[0].get_ylim()[1] > top.get_ydata()[0] == 50
    plt.close(figure)
