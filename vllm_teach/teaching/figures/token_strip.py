"""A text cut into tokens: one chip a token, as wide as its text, with its id beneath."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import page

_PAGE_W = 8.4  # inches, as the maps
_MARGIN, _GAP, _LINE = 0.12, 0.07, 0.78
_CHIP_H = 0.36
_TEXT, _ID = 12.0, 9.0  # points
_ADVANCE = 0.602  # the width of every character of DejaVu Sans Mono, in font sizes
_PADDING = 0.16
_MARKS = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"}  # what is blank on paper, made visible


@dataclass(frozen=True)
class Chip:
    """One token: its text with blanks made visible, its id, and its rectangle in inches (lower left corner, width)."""

    text: str
    token_id: int
    x: float
    y: float
    w: float


@dataclass(frozen=True)
class TokenStrip:
    """The chips in reading order, the lines they fill, and the page in inches."""

    chips: tuple[Chip, ...]
    lines: int
    size: tuple[float, float]


def visible(piece: str) -> str:
    """Return a token's text with its spaces, line ends and tabs as marks: " is" -> "␣is"."""
    return "".join(_MARKS.get(character, character) for character in piece)


def token_strip(pieces: Sequence[str], token_ids: Sequence[int]) -> TokenStrip:
    """Lay the tokens out line by line, widths in proportion to their characters (ids count where they are wider).

    Raises InvalidArgumentError unless there is one id for each piece, and at least one.
    """
    if not pieces or len(pieces) != len(token_ids):
        raise InvalidArgumentError(
            f"pieces has {len(pieces)} entries for {len(token_ids)} token_ids: give one for each."
        )
    laid: list[tuple[str, int, float, int, float]] = []
    x, line = _MARGIN, 0
    for piece, token_id in zip(pieces, token_ids, strict=True):
        text = visible(piece)
        w = max(len(text) * _TEXT, len(str(token_id)) * _ID) * _ADVANCE / 72 + _PADDING
        if x + w > _PAGE_W - _MARGIN and x > _MARGIN:
            x, line = _MARGIN, line + 1
        laid.append((text, token_id, x, line, w))
        x += w + _GAP
    height = 0.42 + (line + 1) * _LINE
    chips = tuple(
        Chip(text, token_id, left, height - 0.42 - at * _LINE - _CHIP_H, w) for text, token_id, left, at, w in laid
    )
    return TokenStrip(chips, line + 1, (_PAGE_W, height))


def draw_tokens(pieces: Sequence[str], token_ids: Sequence[int]) -> tuple[Figure, TokenStrip]:
    """Draw each token as a chip with its id beneath; returns the figure and its data. See `token_strip`."""
    data = token_strip(pieces, token_ids)
    characters = sum(len(piece) for piece in pieces)
    figure, axes = page(*data.size, title=f"{characters} characters become {len(data.chips)} tokens")
    mono: dict[str, Any] = {"ha": "center", "family": "DejaVu Sans Mono"}
    for index, chip in enumerate(data.chips):
        axes.add_patch(
            FancyBboxPatch(
                (chip.x, chip.y),
                chip.w,
                _CHIP_H,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=style.tint(style.sequence_fill(index % 5), 0.55),
                edgecolor="none",
            )
        )
        middle = chip.x + chip.w / 2
        axes.text(middle, chip.y + _CHIP_H / 2, chip.text, size=_TEXT, va="center_baseline", color=style.INK, **mono)
        axes.text(middle, chip.y - 0.05, str(chip.token_id), size=_ID, va="top", color=style.QUIET_INK, **mono)
    return figure, data
