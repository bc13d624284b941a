import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.attention.patterns import BlockSparsePattern
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.density_and_tiles import density_curves, draw_density_curves


def test_blocks_of_whole_tiles_cost_their_density() -> None:
    data = density_curves(256, 16, [16, 32], [0.25, 0.5, 1.0])
    for block in (16, 32):
        assert data.visited[block] == pytest.approx(data.density[block])
    assert data.at(32, 0.5) == pytest.approx(0.5, abs=0.02)


def test_shares_are_counted_from_the_mask() -> None:
    data = density_curves(128, 16, [4], [0.1])
    mask = BlockSparsePattern.random(32, 4, density=0.1, causal=False).mask(128, 128)
    tiles = mask.view(8, 16, 8, 16).any(dim=3).any(dim=1)
    assert data.density[4] == (pytest.approx(float(mask.double().mean())),)
    assert data.visited[4] == (pytest.approx(float(tiles.double().mean())),)
    assert data.visited[4][0] > 2 * data.density[4][0]


def test_a_layout_too_thin_for_its_diagonal_is_left_out() -> None:
    data = density_curves(128, 16, [64], [0.25, 0.5, 1.0])  # two blocks: the diagonal alone is half of all
    assert len(data.density[64]) == 2


def test_one_line_a_block_size() -> None:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        data = density_curves(128, 16, [8, 32], [0.25, 0.5, 1.0])
        _, axes = plt.subplots()
        draw_density_curves(axes, data)
        lines = {line.get_label(): line for line in axes.lines}
        assert tuple(lines["blocks of 8"].get_ydata()) == data.visited[8]
        assert tuple(lines["blocks of 32"].get_xdata()) == data.density[32]
        assert "cost = density" in lines
        plt.close("all")
