import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.token_strip import draw_tokens, token_strip, visible

PIECES = ["Token", "ization", " is", "\n", " fun"] * 6
IDS = list(range(27000, 27000 + len(PIECES)))


def test_blanks_become_visible() -> None:
    assert visible(" is\n\t") == "\u2423is\u21b5\u21e5"


def test_chips_keep_order_and_widths_follow_the_text() -> None:
    strip = token_strip(["ab", "abcdefgh", "abcdefghijklmnop"], [1, 2, 3])
    assert [chip.token_id for chip in strip.chips] == [1, 2, 3]
    short, middle, long = (chip.w for chip in strip.chips)
    assert long - middle == pytest.approx((middle - short) * 8 / 6)


def test_a_long_id_widens_a_short_chip() -> None:
    narrow, wide = token_strip(["a", "a"], [1, 49151]).chips
    assert wide.w > narrow.w


def test_chips_wrap_inside_the_page_and_never_overlap() -> None:
    strip = token_strip(PIECES, IDS)
    assert strip.lines > 1
    for chip in strip.chips:
        assert chip.x > 0
        assert chip.x + chip.w < strip.size[0]
        assert 0 < chip.y < strip.size[1]
    for before, after in zip(strip.chips, strip.chips[1:], strict=False):
        assert after.y < before.y or after.x > before.x + before.w
    assert len({chip.y for chip in strip.chips}) == strip.lines


def test_the_drawing_shows_every_piece_inside_its_chip() -> None:
    figure, strip = draw_tokens(PIECES, IDS)
    figure.draw_without_rendering()
    texts = [text for text in figure.axes[0].texts if text.get_text() in {chip.text for chip in strip.chips}]
    assert [text.get_text() for text in texts] == [chip.text for chip in strip.chips]
    for text, chip in zip(texts, strip.chips, strict=True):
        assert text.get_window_extent().width / figure.dpi < chip.w
    assert any(
        text.get_text() == f"{sum(map(len, PIECES))} characters become {len(PIECES)} tokens"
        for text in figure.axes[0].texts
    )
    plt.close(figure)


@pytest.mark.parametrize(("pieces", "ids"), [([], []), (["a"], [1, 2])])
def test_pieces_and_ids_must_match(pieces: list[str], ids: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="pieces has"):
        token_strip(pieces, ids)
