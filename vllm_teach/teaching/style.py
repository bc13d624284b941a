"""One look for all lessons: a colour per concept, readable sizes, labels with units, reproducible pictures.

The colours are Okabe and Ito's (2008) and Paul Tol's "muted" set, both made for colour-blind readers. Two concepts of
one family (the lines of one figure) are told apart under deuteranopia and protanopia: a test simulates both.
"""

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from vllm_teach.errors import InvalidArgumentError

# Concepts that one figure may show side by side, with the colour each keeps in every lesson. The warm colour of a
# family is the problem, the cool one the cure.
FAMILIES: dict[str, dict[str, str]] = {
    "implementation": {
        "naive": "#D55E00",
        "tiled": "#0072B2",
        "sdpa": "#009E73",
        "memory_efficient": "#56B4E9",
        "paged": "#CC79A7",
        "cpu": "#332288",
        "flash_attn": "#661100",
        "xformers": "#E6C619",
        "triton": "#333333",
        "flex": "#A0C36A",
    },
    "phase": {"prefill": "#44AA99", "decode": "#332288"},
    "cache": {"uncached": "#CC6677", "cached": "#117733"},
    "part": {"attention": "#AA4499", "linear": "#999933", "other": "#BBBBBB"},
    "role": {"baseline": "#777777", "ideal": "#000000", "limit": "#882255", "measured": "#0072B2"},
    "traffic": {"read": "#56B4E9", "written": "#E69F00", "saved": "#DDDDDD"},
    "tile": {"done": "#88CCEE", "current": "#E69F00", "pending": "#EEEEEE", "skipped": "#BBBBBB"},
    "dtype": {"float32": "#4477AA", "float16": "#AA3377", "bfloat16": "#CCBB44"},
    "pattern": {"causal": "#332288", "local_window": "#CC3311", "sinks": "#33BBEE", "block_sparse": "#DDAA33"},
    "prefix": {"hash": "#0072B2", "radix": "#E69F00", "unlimited": "#000000"},
    "quantization": {"rtn": "#D55E00", "gptq": "#0072B2", "awq": "#009E73", "int8": "#CC79A7"},
    "policy": {"round_robin": "#D55E00", "random": "#CC79A7", "least_conn": "#0072B2"},
    "eviction": {"lru": "#0072B2", "lfu": "#D55E00", "none": "#777777"},
    "verdict": {"confirmed": "#0072B2", "partly": "#EEDD88", "contradicted": "#D55E00", "undecided": "#BBBBBB"},
    "map": {"here": "#E69F00", "room": "#DCE9F2", "planned": "#FFFFFF"},
}
COLOURS: dict[str, str] = {concept: value for family in FAMILIES.values() for concept, value in family.items()}
COLOURS["mlp"] = COLOURS["linear"]  # an MLP is linear layers: one colour

# Fills for "sequence A, B, C, ..." in block tables and timelines: light enough for black text (Tol's "light" set).
SEQUENCE_FILLS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#44BB99", "#99DDFF", "#BBCC33", "#AAAA00")

INK = "#1A1A1A"
QUIET_INK = "#5F5F5F"
PAPER = "#FFFFFF"

_RC: dict[str, object] = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib, so that every machine draws the same letters
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "figure.figsize": (7.0, 3.9),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.constrained_layout.use": True,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E2E2E2",
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "vllm_teach",
}


def apply() -> None:
    """Give matplotlib the lessons' look; changes `matplotlib.rcParams` and, in Jupyter, the inline PNG's metadata."""
    mpl.rcParams.update(_RC)
    mpl.rcParams["axes.prop_cycle"] = cycler(color=list(FAMILIES["implementation"].values()))
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        _leave_out_the_version(shell)


def _leave_out_the_version(shell: Any) -> None:
    """Make Jupyter's pictures carry no matplotlib version: otherwise equal pictures differ between installations."""
    from IPython.core.pylabtools import select_figure_formats
    from matplotlib_inline.config import InlineBackend

    inline = InlineBackend.instance(parent=shell)
    options: dict[str, Any] = {**inline.print_figure_kwargs, "metadata": {"Software": None}}
    inline.print_figure_kwargs = options
    # A figure drawn before has fixed the keyword arguments already.
    select_figure_formats(shell, inline.figure_formats, **options)


def colour(concept: str) -> str:
    """Return the colour "#RRGGBB" that `concept` has in every lesson; InvalidArgumentError for an unknown one."""
    if concept not in COLOURS:
        raise InvalidArgumentError(f"concept={concept!r} has no colour: use one of {', '.join(sorted(COLOURS))}.")
    return COLOURS[concept]


def sequence_fill(index: int) -> str:
    """Return the fill of the index-th sequence in block tables and timelines; after eight the colours repeat."""
    return SEQUENCE_FILLS[index % len(SEQUENCE_FILLS)]


def tint(value: str, strength: float) -> str:
    """Mix a colour with white: strength 1 keeps it, 0 gives white."""
    return to_hex([1 - strength * (1 - channel) for channel in to_rgb(value)]).upper()


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.1); body text wants 4.5 or more."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink_on(fill: str) -> str:
    """Return the text colour, dark or white, that is read best on `fill`."""
    return max((INK, PAPER), key=lambda ink: contrast(ink, fill))


def _luminance(value: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(value)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def format_bytes(count: float, _position: object = None) -> str:
    """Write a number of bytes with a binary prefix: 1536 -> "1.5 KiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_seconds(seconds: float, _position: object = None) -> str:
    """Write a time with the unit that fits: 0.0021 -> "2.1 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{_short(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{_short(seconds * 1e9)} ns"


def format_count(count: float, _position: object = None) -> str:
    """Write a count with a decimal prefix: 2.5e9 -> "2.5 G"; small ones stand as they are."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P")).strip()


def format_tokens(count: float, _position: object = None) -> str:
    """Write a sequence length in full with thousands marked: 4096 -> "4,096"."""
    return f"{count:,.0f}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 0.9995 * step and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{_short(value)} {units[power]}"


def _short(value: float) -> str:
    """Three significant digits, no exponent, no trailing zeros: whole numbers keep all of their digits."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


_FORMATS: dict[str, Callable[..., str]] = {
    "tokens": format_tokens,
    "bytes": format_bytes,
    "seconds": format_seconds,
    "count": format_count,
}
Kind = Literal["tokens", "bytes", "seconds", "count"]


def label_axis(
    ax: Axes,
    which: Literal["x", "y"],
    text: str,
    *,
    kind: Kind | None = None,
    unit: str | None = None,
    log: int | None = None,
    ticks: Iterable[float] | None = None,
) -> None:
    """Label one axis of `ax`: `text`, the unit in brackets, and "log scale" when `log` (the base, 2 or 10) is given.

    `kind` writes the tick labels as tokens, bytes, seconds or counts, with their own units ("64 KiB", "2 ms"). `ticks`
    puts the ticks where the data is. Changes `ax`. Raises InvalidArgumentError for an unknown kind.
    """
    if kind is not None and kind not in _FORMATS:
        raise InvalidArgumentError(f"kind={kind!r} has no tick format: use one of {', '.join(_FORMATS)}.")
    axis = ax.xaxis if which == "x" else ax.yaxis
    if log is not None:
        (ax.set_xscale if which == "x" else ax.set_yscale)("log", base=log)
        axis.set_major_locator(LogLocator(base=log, numticks=8))
        axis.set_minor_locator(NullLocator())
    if ticks is not None:
        axis.set_ticks(list(ticks))
    if kind is not None:
        axis.set_major_formatter(FuncFormatter(_FORMATS[kind]))
    brackets = [part for part in (unit, "log scale" if log is not None else None) if part]
    axis.set_label_text(f"{text} ({', '.join(brackets)})" if brackets else text)


def to_png(figure: Figure) -> bytes:
    """Draw `figure` as PNG; the same figure gives the same bytes on the same matplotlib, whatever its version says."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
