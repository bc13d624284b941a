import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.attention import naive_attention
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.weight_by_place import draw_weight_by_place, weight_by_place

FIRST, WINDOW, LENGTH = 2, 5, 40


@pytest.fixture(scope="module")
def projections() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(LENGTH, heads, 8, generator=generator, dtype=torch.float64)

    return {layer: (draw(4), draw(2)) for layer in (0, 3)}


def test_shares_are_sums_of_the_probabilities(projections) -> None:
    data = weight_by_place(projections, FIRST, WINDOW)
    assert data.layers == (0, 3)
    for row, (q, k) in enumerate(projections.values()):
        _, probs = naive_attention(q[None], k[None], k[None], causal=True, return_probs=True)
        mean = probs[0].mean(dim=0)  # [queries, keys]
        for query in range(LENGTH):
            nearest = range(max(FIRST, query - WINDOW + 1), query + 1)
            sinks, window = float(mean[query, :FIRST].sum()), float(mean[query, list(nearest)].sum())
            assert float(data.shares["sinks"][row, query]) == pytest.approx(sinks)
            assert float(data.shares["local_window"][row, query]) == pytest.approx(window)
            assert float(data.shares["rest"][row, query]) == pytest.approx(1 - sinks - window, abs=1e-9)


def test_share_is_the_mean_of_the_queries_that_see_a_rest(projections) -> None:
    data = weight_by_place(projections, FIRST, WINDOW)
    assert data.share("rest") == pytest.approx(float(data.shares["rest"][:, FIRST + WINDOW :].mean()))
    assert data.share("sinks", beyond=0) == pytest.approx(float(data.shares["sinks"].mean()))
    assert sum(data.share(place) for place in data.shares) == pytest.approx(1)


@pytest.mark.parametrize(("first", "window", "text"), [(0, 5, "first"), (2, 0, "window")])
def test_sizes_must_be_positive(projections, first, window, text) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        weight_by_place(projections, first, window)


def test_at_least_one_layer() -> None:
    with pytest.raises(InvalidArgumentError, match="projections is empty"):
        weight_by_place({}, 1, 2)


def test_the_bars_are_the_shares_of_each_layer(projections) -> None:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        data = weight_by_place(projections, FIRST, WINDOW)
        figure = draw_weight_by_place(data, smooth=8)
        left, right = figure.axes
        widths = [patch.get_width() for patch in right.patches]
        start = FIRST + WINDOW
        wanted = [float(data.shares[p][r, start:].mean()) for p in ("sinks", "local_window", "rest") for r in (0, 1)]
        assert widths == pytest.approx(wanted)
        assert [label.get_text() for label in right.get_yticklabels()] == ["0", "3"]
        assert left.get_ylim() == (0, 1)
        plt.close("all")
