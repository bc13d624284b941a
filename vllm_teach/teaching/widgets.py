"""Sliders over a pure function: `render(state)` draws a PNG, `readout(state)` says its number in words.

    explore(render, readout=readout, step=range(8))                       # a cell's last expression
    twin(render, [{"step": 0}, {"step": 5}], readout=readout)             # the next cell: static, compared by CI

`ipywidgets.interact` is not used: it shows its result in an Output widget, whose content is no output of the cell, so
nbval could not compare it. Here the cell's own output holds a stable text beside the widget.
"""

import base64
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from typing import Any

from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError, MissingDependencyError, installs
from vllm_teach.teaching import style
from vllm_teach.teaching.canonical import WIDGET_VIEW

State = Mapping[str, Any]
Render = Callable[[State], bytes]
Readout = Callable[[State], str]


def figure_png(figure: Figure) -> bytes:
    """Draw a figure as PNG and close it (in pyplot too), so that 100 redraws do not keep 100 figures alive."""
    import matplotlib.pyplot as plt

    png = style.to_png(figure)
    plt.close(figure)
    return png


class Explorer:
    """A picture, its readout and one slider per name; show it as a cell's last expression or with `display`.

    render: state -> PNG bytes, pure: called once per state. readout: state -> one line with the picture's number.
    sliders: name -> the allowed values in order; a `range` gives a slider of integers, a list one of choices.
    Move a slider with the mouse or, when it has the focus, with the arrow keys.
    """

    def __init__(self, render: Render, readout: Readout, sliders: Mapping[str, Sequence[Any]]) -> None:
        if not sliders:
            raise InvalidArgumentError(
                "sliders is empty: name at least one, as in explore(render, ..., step=range(8))."
            )
        for name, values in sliders.items():
            _check_values(name, values)
        self._render, self._readout = render, readout
        self._drawn: dict[tuple[Any, ...], tuple[bytes, str]] = {}
        self._values = dict(sliders)
        self.sliders = {name: _slider(name, values) for name, values in sliders.items()}
        widgets = _ipywidgets()
        png, text = self._draw(self.state)
        self.image = widgets.Image(value=png, format="png")
        self.label = widgets.Label(value=text)
        for slider in self.sliders.values():
            slider.observe(self._redraw, names="value")
        self.box = widgets.VBox([*self.sliders.values(), self.label, self.image])

    @property
    def state(self) -> dict[str, Any]:
        """The sliders' values now, by name."""
        return {name: slider.value for name, slider in self.sliders.items()}

    def _draw(self, state: dict[str, Any]) -> tuple[bytes, str]:
        key = tuple(state.values())
        if key not in self._drawn:
            self._drawn[key] = (self._render(state), self._readout(state))
        return self._drawn[key]

    def _redraw(self, _change: object) -> None:
        try:
            self.image.value, self.label.value = self._draw(self.state)
        except Exception as error:  # noqa: BLE001 - Jupyter hides what a callback raises in a log nobody reads
            self.label.value = f"{type(error).__name__}: {error}"

    def _repr_mimebundle_(self, **_options: object) -> dict[str, Any]:
        """The widget for a live notebook; the picture for a page without a kernel; a text that CI compares."""
        png, text = self._draw(self.state)
        ranges = ", ".join(f"{name} from {values[0]} to {values[-1]}" for name, values in self._values.items())
        return {
            WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id},
            "image/png": base64.b64encode(png).decode(),
            "text/plain": f"Slider: {ranges}. At {_describe(self.state)}: {text}",
        }


def explore(render: Render, *, readout: Readout, **sliders: Sequence[Any]) -> Explorer | None:
    """Return a widget that redraws as its sliders move; without ipywidgets print a note and show the static twin.

    The static twin then shows the first, a middle and the last setting, all sliders moving together.
    Raises InvalidArgumentError without a slider, or for one whose values are not two or more in an order.
    """
    try:
        return Explorer(render, readout, sliders)
    except MissingDependencyError as error:
        print(f"{error} Here are three settings instead.")
    parts = (0.0, 0.5, 1.0)
    twin(render, [{n: v[round(part * (len(v) - 1))] for n, v in sliders.items()} for part in parts], readout=readout)
    return None


def twin(render: Render, states: Sequence[State], *, readout: Readout) -> None:
    """Show the picture at each state, and print each state's readout: the line that CI compares.

    Raises MissingDependencyError without IPython.
    """
    try:
        from IPython.display import Image, display
    except ImportError as error:
        raise MissingDependencyError(f"IPython is not installed: run {installs('lab')}.") from error
    for state in states:
        print(f"{_describe(state)}: {readout(state)}")
        display(Image(data=render(state), format="png"))


def _describe(state: State) -> str:
    return ", ".join(f"{name} = {value}" for name, value in state.items())


def _check_values(name: str, values: object) -> None:
    """Raise InvalidArgumentError unless `values` is a sequence, or an array, of two values or more."""
    ordered = isinstance(values, Sized) and hasattr(values, "__getitem__") and not isinstance(values, Mapping)
    if not ordered or isinstance(values, str | bytes):
        raise InvalidArgumentError(
            f"sliders[{name!r}] is of type {type(values).__name__}: give a range, or a list of values in their order."
        )
    assert isinstance(values, Sized)
    if len(values) < 2:
        raise InvalidArgumentError(f"sliders[{name!r}] has {len(values)} values: a slider needs at least two.")
    if isinstance(values, range):
        return
    for value in values:  # type: ignore[attr-defined]
        if not isinstance(value, Hashable) or value != value or value is None:
            raise InvalidArgumentError(
                f"sliders[{name!r}] has the value {value!r}: use numbers, texts or tuples, which can be told apart."
            )


def _slider(name: str, values: Sequence[Any]) -> Any:
    widgets = _ipywidgets()
    # "initial" lets a long name push the slider to the right instead of being cut.
    common = {"description": name, "style": {"description_width": "initial"}, "continuous_update": True}
    if isinstance(values, range):
        low, high = sorted((values[0], values[-1]))
        return widgets.IntSlider(value=values[0], min=low, max=high, step=abs(values.step), **common)
    return widgets.SelectionSlider(value=values[0], options=list(values), **common)


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError as error:
        raise MissingDependencyError(f"ipywidgets is not installed: run {installs('lab')}.") from error
    return ipywidgets
