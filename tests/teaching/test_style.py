import base64
import itertools

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
SIMULATIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
# Families whose members are drawn as neighbours; the map's fills are told apart by their borders too.
TOLD_APART = [name for name in style.FAMILIES if name != "map"]


def lab(value: str, simulation: np.ndarray) -> np.ndarray:
    rgb = np.array(to_rgb(value))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(simulation @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    scaled = xyz / np.array([0.9505, 1.0, 1.089])
    f = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("family", TOLD_APART)
@pytest.mark.parametrize("sight", SIMULATIONS)
def test_colours_of_a_family_are_told_apart(family: str, sight: str) -> None:
    for (a, first), (b, second) in itertools.combinations(style.FAMILIES[family].items(), 2):
        distance = np.linalg.norm(lab(first, SIMULATIONS[sight]) - lab(second, SIMULATIONS[sight]))
        assert distance >= 15, f"{a} and {b} look alike under {sight}: {distance:.1f}"


def test_the_contract_of_concepts() -> None:
    wanted = "naive tiled sdpa paged memory_efficient prefill decode cached uncached attention linear mlp baseline"
    wanted += " ideal limit"
    assert set(wanted.split()) <= set(style.COLOURS)
    assert style.colour("mlp") == style.colour("linear")


def test_one_concept_has_one_colour() -> None:
    concepts = [concept for family in style.FAMILIES.values() for concept in family]
    assert len(concepts) == len(set(concepts))


def test_unknown_concept_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'fast'.*naive"):
        style.colour("fast")


def test_contrast_of_known_pairs() -> None:
    assert style.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert style.contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)  # WCAG's well-known near miss


def test_text_is_readable_on_every_sequence_fill_and_map_fill() -> None:
    for fill in (*style.SEQUENCE_FILLS, *style.FAMILIES["map"].values()):
        assert style.contrast(style.ink_on(fill), fill) >= 4.5
    assert style.contrast(style.QUIET_INK, style.PAPER) >= 4.5


def test_tint_mixes_with_white() -> None:
    assert style.tint("#000000", 0.0) == "#FFFFFF"
    assert style.tint("#0072B2", 1.0) == "#0072B2"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (1024**2, "1 MiB"), (1023.9, "1 KiB"), (3 * 1024**3, "3 GiB")],
)
def test_format_bytes(value: float, text: str) -> None:
    assert style.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.5, "1.5 s"),
        (0.0021, "2.1 ms"),
        (4e-6, "4 µs"),
        (5e-9, "5 ns"),
        (0.99999, "1 s"),
        (1234, "1234 s"),
    ],
)
def test_format_seconds(value: float, text: str) -> None:
    assert style.format_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(7, "7"), (2500, "2.5 k"), (2.5e9, "2.5 G"), (999.9, "1 k")])
def test_format_count(value: float, text: str) -> None:
    assert style.format_count(value) == text


def test_label_axis_says_unit_and_log_scale() -> None:
    ax = Figure().add_subplot()
    style.label_axis(ax, "x", "sequence length", unit="tokens", kind="tokens", log=2, ticks=[128, 1024])
    style.label_axis(ax, "y", "time", kind="seconds")
    assert ax.get_xlabel() == "sequence length (tokens, log scale)"
    assert ax.get_xscale() == "log"
    assert [ax.xaxis.get_major_formatter()(tick) for tick in ax.get_xticks()] == ["128", "1,024"]
    assert ax.get_ylabel() == "time"
    assert ax.yaxis.get_major_formatter()(0.002) == "2 ms"


def test_label_axis_refuses_an_unknown_kind() -> None:
    with pytest.raises(InvalidArgumentError, match="'metres'"):
        style.label_axis(Figure().add_subplot(), "x", "length", kind="metres")


def test_apply_and_reproducible_png() -> None:
    with mpl.rc_context():
        style.apply()
        assert mpl.rcParams["font.family"] == ["DejaVu Sans"]

        def draw() -> bytes:
            figure = Figure()
            figure.add_subplot().plot([0, 1], [0, 1])
            return style.to_png(figure)

        first = draw()
        assert first == draw()
        assert b"matplotlib" not in first.lower()


def test_pictures_in_a_notebook_carry_no_version() -> None:
    import nbformat
    from nbclient import NotebookClient

    before = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    after = "from vllm_teach.teaching import style\nstyle.apply()\nplt.plot([1, 2]);"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (before, after)])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    pictures = [
        base64.b64decode(output["data"]["image/png"])
        for cell in notebook.cells
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert [b"Software" in picture for picture in pictures] == [True, False]
