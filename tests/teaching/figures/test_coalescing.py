import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.coalescing import draw_warp_load, warp_load


def title(ax) -> str:
    return "".join(ax.get_title(loc=place) for place in ("left", "center"))  # wherever the style puts it


@pytest.mark.parametrize(
    ("width", "stride", "sectors", "used"),
    [(2, 2, 2, 1), (16, 16, 16, 1), (2, 16, 16, 1 / 8), (2, 32, 32, 1 / 16), (4, 128, 32, 1 / 8)],
)
def test_sectors_of_a_load(width: int, stride: int, sectors: int, used: float) -> None:
    data = warp_load(width, stride)
    assert len(data.sectors) == sectors
    assert data.used == used
    assert data.asked_for == 32 * width
    assert data.describe() == (
        f"{32 * width} bytes asked for, {sectors} sectors = {32 * sectors:,} bytes sent, {used:.0%} of them used"
    )


@pytest.mark.parametrize(("width", "stride"), [(0, 2), (4, 2), (4, 6)])
def test_threads_do_not_overlap_and_loads_are_aligned(width: int, stride: int) -> None:
    with pytest.raises(InvalidArgumentError, match="give a multiple of the width"):
        warp_load(width, stride)


def test_a_frame_for_each_sector_on_the_page_and_a_cell_for_each_two_bytes() -> None:
    figure = draw_warp_load(warp_load(2, 64))
    (ax,) = figure.axes
    assert len(ax.patches) == 1024 // 64
    cells = [len(collection.get_paths()) for collection in ax.collections]
    assert cells == [16, 16 * 15, 512 - 16 * 16]
    assert title(ax) == "32 sectors are sent for 64 bytes: 6% is used"
    assert "goes on to byte 2,016" in figure.legends[0].get_texts()[-1].get_text()


def test_a_coalesced_load_uses_every_byte() -> None:
    (ax,) = draw_warp_load(warp_load(16, 16)).axes
    assert title(ax) == "Every byte of 16 sectors is used"
