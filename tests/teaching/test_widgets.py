"""The widget is a thin shell around a pure function, draws each state once, and shows what CI can compare."""

import base64
import builtins

import matplotlib.pyplot as plt
import numpy as np
import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import explore, figure_png, twin
from vllm_teach.teaching.canonical import WIDGET_VIEW


def render(state):
    figure, axes = plt.subplots()
    axes.bar(range(8), [min(x, state["step"]) for x in range(8)])
    return figure_png(figure)


def readout(state):
    return f"sum {sum(min(x, state['step']) for x in range(8))}"


def test_moving_the_slider_changes_picture_and_readout():
    explorer = explore(render, readout=readout, step=range(8))
    assert explorer.state == {"step": 0}
    before = explorer.image.value
    assert explorer.label.value == "sum 0"
    explorer.sliders["step"].value = 3
    assert explorer.image.value == render({"step": 3}) != before
    assert explorer.label.value == "sum 18"


def test_a_move_draws_once_and_a_second_visit_not_at_all():
    drawn, read = [], []

    def counted(state):
        drawn.append(state["step"])
        return b"a picture"

    def counted_readout(state):
        read.append(state["step"])
        return "a number"

    explorer = explore(counted, readout=counted_readout, step=range(8))
    for step in (1, 2, 3, 1, 0):
        explorer.sliders["step"].value = step
    explorer._repr_mimebundle_()
    assert drawn == read == [0, 1, 2, 3]


def test_what_the_cell_shows_is_stable_and_has_the_readout():
    bundles = [explore(render, readout=readout, step=range(8))._repr_mimebundle_() for _ in range(2)]
    views = [bundle.pop(WIDGET_VIEW)["model_id"] for bundle in bundles]
    assert views[0] != views[1]
    assert bundles[0] == bundles[1]
    assert bundles[0]["text/plain"] == "Slider: step from 0 to 7. At step = 0: sum 0"
    assert base64.b64decode(bundles[0]["image/png"]) == render({"step": 0})


def test_ipython_shows_the_bundle_and_adds_nothing():
    from IPython.core.formatters import DisplayFormatter

    data, _ = DisplayFormatter().format(explore(render, readout=readout, step=range(8)))
    assert set(data) == {WIDGET_VIEW, "image/png", "text/plain"}
    assert data["text/plain"].startswith("Slider: ")


def test_choices_and_two_sliders():
    drawn = []

    def note(state):
        drawn.append(dict(state))
        return render({"step": state["tile"]})

    explorer = explore(note, readout=str, tile=[2, 4, 8], step=range(6, 0, -2))
    assert explorer.state == {"tile": 2, "step": 6}
    explorer.sliders["tile"].value = 8
    explorer.sliders["step"].value = 2
    explorer.sliders["step"].value = 6
    assert drawn == [{"tile": 2, "step": 6}, {"tile": 8, "step": 6}, {"tile": 8, "step": 2}]
    assert (explorer.sliders["step"].min, explorer.sliders["step"].max) == (2, 6)


def test_an_error_while_redrawing_is_shown_in_the_readout():
    def fragile(state):
        if state["step"] == 2:
            raise ValueError("no picture for 2")
        return render(state)

    explorer = explore(fragile, readout=readout, step=range(8))
    explorer.sliders["step"].value = 2
    assert explorer.label.value == "ValueError: no picture for 2"
    explorer.sliders["step"].value = 3
    assert explorer.label.value == "sum 18"


def test_twin_prints_a_line_a_setting(capsys):
    twin(render, [{"step": 0}, {"step": 7}], readout=readout)
    printed = capsys.readouterr().out
    assert "step = 0: sum 0\n" in printed
    assert "step = 7: sum 28\n" in printed


def test_without_ipywidgets_the_static_twin_and_a_note(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert explore(render, readout=readout, step=range(8)) is None
    printed = capsys.readouterr().out
    hint = 'ipywidgets is not installed: run pip install -e ".[lab]" in the clone. Here are three settings instead.'
    assert hint in printed
    assert [line for line in printed.splitlines() if line.startswith("step = ")] == [
        "step = 0: sum 0",
        "step = 4: sum 22",
        "step = 7: sum 28",
    ]


def test_figures_are_closed_and_reproducible():
    first = render({"step": 4})
    assert plt.get_fignums() == []
    assert render({"step": 4}) == first
    assert b"Software" not in first


@pytest.mark.parametrize("sliders", [{}, {"step": range(1)}, {"step": []}])
def test_sliders_that_cannot_move(sliders):
    with pytest.raises(InvalidArgumentError, match="sliders"):
        explore(render, readout=readout, **sliders)


@pytest.mark.parametrize(
    "values",
    [5, {1, 2}, {"a": 1, "b": 2}, (n for n in range(3)), None, "ab", [], [[1], [2]], [float("nan"), 1.0], [None, 1]],
)
def test_values_that_make_no_slider_are_refused(values):
    with pytest.raises(InvalidArgumentError, match=r"^sliders\['step'\] "):
        explore(render, readout=readout, step=values)


def test_an_array_of_numpy_makes_a_slider():
    assert explore(render, readout=readout, step=np.arange(3)).state == {"step": 0}
