import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.grouped_heads import draw_grouped_heads, grouped_heads


def test_consecutive_query_heads_share_a_key_head() -> None:
    assert grouped_heads(9, 3).kv_head_of == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert grouped_heads(4, 1).kv_head_of == (0, 0, 0, 0)
    assert grouped_heads(2, 2).group == 1


def test_one_line_is_drawn_from_each_query_head_to_its_key_head() -> None:
    figure, data = draw_grouped_heads(6, 2)
    (axes,) = figure.axes
    ends = [line.get_xdata()[1] for line in axes.lines]
    assert len(ends) == 6
    assert len(set(ends)) == 2
    assert [ends.index(end) // 3 for end in ends] == list(data.kv_head_of)
    assert {"q0", "q5", "k0, v0", "k1, v1"} <= {text.get_text() for text in axes.texts}


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(9, 2), (0, 1), (3, 0)])
def test_heads_that_do_not_divide(q_heads: int, kv_heads: int) -> None:
    with pytest.raises(InvalidArgumentError, match="multiple"):
        grouped_heads(q_heads, kv_heads)
