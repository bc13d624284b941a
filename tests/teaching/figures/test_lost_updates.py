from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.teaching import style
from vllm_teach.teaching.figures.lost_updates import draw_lost_updates, lost_updates


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_around_one_the_dtypes_gaps_decide() -> None:
    """Just above 1 neighbours are 2**-7 apart in bfloat16 and 2**-10 in float16: half of it is rounded away."""
    data = lost_updates([torch.full((4,), 1.25)], [2**-12, 2**-9, 2**-6])
    assert data.share["bfloat16"] == (1, 1, 0)
    assert data.share["float16"] == (1, 0, 0)
    assert data.share["float32"] == (0, 0, 0)


def test_below_a_power_of_two_the_gap_is_half_as_wide() -> None:
    """From 1 an update of 2**-8 upwards is a tie that goes back to 1, and downwards it is a whole step."""
    assert lost_updates([torch.ones(1)], [2**-8]).share["bfloat16"] == (0.5,)


def test_it_is_a_share_over_all_tensors_and_falls_with_the_size() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [0.05 * torch.randn(50, 10, generator=generator), torch.randn(100, generator=generator)]
    data = lost_updates(weights, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    for shares in data.share.values():
        assert list(shares) == sorted(shares, reverse=True)
    both = lost_updates([torch.full((3,), 1.25), torch.full((1,), 0.001)], [2**-12])
    assert both.share["bfloat16"] == (0.75,)


def test_the_lines_are_percent() -> None:
    _, axes = plt.subplots()
    data = lost_updates([torch.full((4,), 1.25)], [2**-12, 2**-6])
    draw_lost_updates(axes, data)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["weights in bfloat16"] == [100, 0]
