from collections.abc import Iterator

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt

from vllm_teach.teaching import style
from vllm_teach.teaching.figures import dropout_mask
from vllm_teach.teaching.figures.dropout_mask import draw_stitched_mask, stitched_mask


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


@pytest.mark.parametrize(("n", "tile"), [(64, 16), (50, 16), (7, 8)])
def test_the_tiles_make_up_the_whole(n: int, tile: int) -> None:
    data = stitched_mask(n, tile, 0.1, seed=3)
    assert data.equal
    assert len(set(data.order)) == len(data.order) == (-(-n // tile)) ** 2
    assert data.dropped == int((~data.stitched).sum())


def test_the_order_is_another_than_reading_order_and_the_share_is_about_p() -> None:
    data = stitched_mask(64, 16, 0.1, seed=7)
    assert list(data.order) != sorted(data.order)
    assert 0.05 < data.dropped / 64**2 < 0.15


def test_a_generator_with_a_state_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def stateful(
        seed: int, p: float, heads: torch.Tensor, rows: tuple[int, int], keys: tuple[int, int]
    ) -> torch.Tensor:
        return torch.rand(1, rows[1] - rows[0], keys[1] - keys[0], generator=generator) >= p

    monkeypatch.setattr(dropout_mask, "keep_mask", stateful)
    figure, data = draw_stitched_mask(32, 16, 0.1, seed=1)
    assert not data.equal
    assert figure.get_suptitle() == "The masks differ"


def test_the_pictures_are_the_masks() -> None:
    figure, data = draw_stitched_mask(32, 16, 0.2, seed=1)
    left, right = figure.axes
    assert (left.images[0].get_array() == data.whole.numpy()).all()
    assert (right.images[0].get_array() == data.stitched.numpy()).all()
    assert sorted(text.get_text() for text in right.texts) == ["1", "2", "3", "4"]
    first = next(text for text in right.texts if text.get_text() == "1")
    assert first.get_position() == (data.order[0][1][0] + 7.5, data.order[0][0][0] + 7.5)
