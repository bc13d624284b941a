import pytest
from matplotlib import pyplot as plt

from vllm_teach.backends.conformance import ROWS
from vllm_teach.teaching.figures.error_rule import RowErrors, draw_error_rule, row_errors

ROW = next(row for row in ROWS if row.name == "causal 129x257 bf16")


def test_the_plain_formula_is_its_own_measure() -> None:
    found = row_errors(ROW, ("naive", "tiled", "sdpa"))
    assert found.row == ROW.name
    assert found.errors["naive"] == pytest.approx(found.plain_error, rel=1e-6)
    assert found.limit == pytest.approx(2 * found.plain_error + 1e-5)
    assert all(found.keeps(name) for name in found.errors)


def test_over_the_limit() -> None:
    one = RowErrors("a row", 0.01, {"naive": 0.01, "tiled": 0.02, "sdpa": 0.0202})
    assert [one.keeps(name) for name in one.errors] == [True, True, False]


def test_marks_stand_at_multiples_of_the_plain_error() -> None:
    data = [RowErrors("first", 0.01, {"naive": 0.01, "tiled": 0.005}), RowErrors("second", 0.1, {"tiled": 0.3})]
    figure = draw_error_rule(data)
    (ax,) = figure.axes
    marks = {line.get_label(): line for line in ax.lines}
    assert list(marks["tiled"].get_xdata()) == pytest.approx([0.5, 3.0])
    assert [round(place) for place in marks["tiled"].get_ydata()] == [0, 1]
    assert list(marks["naive"].get_xdata()) == pytest.approx([1.0])
    assert list(marks["limit"].get_xdata()) == [2, 2]
    assert ax.get_xlim()[1] > 3
    plt.close(figure)
