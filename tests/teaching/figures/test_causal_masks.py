import pytest
import torch
from matplotlib.colors import to_hex

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.causal_masks import causal_mask_data, draw_causal_masks


def test_bottom_right_lets_the_last_query_see_every_key() -> None:
    assert causal_mask_data(1, 5, "bottom-right").keys_seen == (5,)
    assert causal_mask_data(2, 5, "bottom-right").keys_seen == (4, 5)


def test_top_left_lets_the_first_query_see_one_key() -> None:
    assert causal_mask_data(1, 5, "top-left").keys_seen == (1,)
    assert causal_mask_data(2, 5, "top-left").keys_seen == (1, 2)


def test_with_equal_lengths_the_two_agree() -> None:
    assert torch.equal(causal_mask_data(4, 4, "top-left").mask, causal_mask_data(4, 4, "bottom-right").mask)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (4, 3)])
def test_lengths_that_cannot_be_drawn(q_len: int, kv_len: int) -> None:
    with pytest.raises(InvalidArgumentError, match="kv_len"):
        causal_mask_data(q_len, kv_len, "top-left")


def test_as_many_cells_are_filled_as_keys_are_seen() -> None:
    figure, panels = draw_causal_masks(kv_len=6)
    (axes,) = figure.axes
    filled = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == style.colour("attention").lower()]
    assert len(filled) == sum(sum(panel.keys_seen) for panel in panels.values()) == 21 + 1 + 6
