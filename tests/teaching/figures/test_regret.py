import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import Timing
from vllm_teach.teaching.figures.regret import draw_regret, regret

TIMED = {
    "short": {"sdpa": Timing.of([1.0, 1.0, 1.0]), "cpu": Timing.of([2.0, 2.0, 2.0])},
    # A slow second round: both are slow in it, and the ratio of each round stays.
    "long": {"sdpa": Timing.of([8.0, 80.0, 8.0]), "cpu": Timing.of([2.0, 20.0, 2.0])},
}
POLICIES = {
    "always sdpa": lambda call, able: "sdpa",
    "the rule": lambda call, able: "cpu" if call == "long" else able[0],
}


def test_regret_is_the_median_ratio_within_rounds() -> None:
    data = regret(TIMED, POLICIES)
    assert data.calls == ("short", "long")
    assert data.choice == {"always sdpa": ("sdpa", "sdpa"), "the rule": ("sdpa", "cpu")}
    assert data.ratio == {"always sdpa": (1.0, 4.0), "the rule": (1.0, 1.0)}
    assert data.worst("always sdpa") == 4
    assert data.typical("always sdpa") == pytest.approx(2)
    assert data.total("always sdpa") == pytest.approx((1 + 4 * 2) / 3)
    assert (data.within("always sdpa", 1.2), data.within("the rule", 1.2)) == (1, 2)


def test_a_choice_that_was_not_timed_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="'flash_attn' was chosen for 'short' and not timed"):
        regret(TIMED, {"another": lambda call, able: "flash_attn"})


def test_a_mark_for_each_policy_and_call_at_its_ratio() -> None:
    data = regret(TIMED, POLICIES)
    figure = draw_regret(data)
    (ax,) = figure.axes
    marks = {line.get_label(): line for line in ax.lines if line.get_label() in POLICIES}
    for policy, ratios in data.ratio.items():
        assert tuple(marks[policy].get_xdata()) == ratios
        assert [round(place) for place in marks[policy].get_ydata()] == [0, 1]
    assert ax.get_xscale() == "log"
    plt.close(figure)
