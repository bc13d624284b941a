import matplotlib.pyplot as plt
import pytest

from vllm_teach.performance.norm_traffic import fused_traffic, op_by_op_traffic
from vllm_teach.teaching.figures.norm_passes import draw_norm_passes, draw_norm_totals, norm_passes, norm_totals

SIZES = {"kind": "layer_norm", "rows": 1024, "size": 1024, "input_bytes": 4}
TENSOR = 1024 * 1024 * 4


def test_bars_are_the_operations_in_units_of_a_tensor() -> None:
    data = norm_passes(TENSOR, op_by_op_traffic(**SIZES))
    assert [name for name, _, _ in data.bars][:3] == ["mean", "x - mean", "square"]
    assert data.total() == pytest.approx(12, abs=0.02)
    assert data.total("x - mean", "square") == pytest.approx(4, abs=0.01)


def test_totals_are_one_bar_for_each_tally() -> None:
    data = norm_totals(TENSOR, {"eager": op_by_op_traffic(**SIZES), "fused": fused_traffic(**SIZES)})
    assert data.total("eager") == pytest.approx(12, abs=0.02)
    assert data.total("fused") == pytest.approx(2, abs=0.01)


def test_bars_follow_each_other_and_the_fused_one_starts_anew() -> None:
    data = norm_passes(TENSOR, op_by_op_traffic(**SIZES))
    _, ax = plt.subplots()
    draw_norm_passes(ax, data, (1.0, 1.0))
    bars = list(ax.patches)
    assert len(bars) == 2 * (len(data.bars) + 1)
    read, written = bars[:-2:2], bars[1:-2:2]
    for index in range(1, len(data.bars)):
        assert read[index].get_x() == pytest.approx(written[index - 1].get_x() + written[index - 1].get_width())
    assert bars[-2].get_x() == 0
    assert [tick.get_text() for tick in ax.get_yticklabels()][-1] == "one kernel"


def test_totals_start_at_0_and_name_their_multiple() -> None:
    data = norm_totals(TENSOR, {"eager": op_by_op_traffic(**SIZES), "fused": fused_traffic(**SIZES)})
    _, ax = plt.subplots()
    draw_norm_totals(ax, data, least=2)
    assert [bar.get_x() for bar in ax.patches[::2]] == [0, 0]
    assert [text.get_text() for text in ax.texts] == ["12 (6 x)", "2 (1 x)"]
