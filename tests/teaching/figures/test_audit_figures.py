"""Lesson 13's figures: their data against what they are drawn from, and what is drawn against the data."""

import math

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.check_lines import check_line, draw_check_lines
from vllm_teach.teaching.figures.in_flight import Point, draw_in_flight_lines
from vllm_teach.teaching.figures.modelled_claims import Reading, draw_readings
from vllm_teach.teaching.figures.published_facts import (
    FACTS,
    draw_published_facts,
    published_facts,
    tables_with_numbers,
)
from vllm_teach.teaching.figures.published_runs import Pair, draw_pairs
from vllm_teach.teaching.figures.ratio_by_setting import HEAD_DIMS, LENGTHS, MASKS, draw_ratios, ratios_by_setting
from vllm_teach.teaching.figures.tolerance_bars import draw_tolerance
from vllm_teach.teaching.figures.verdict_grid import LOOKS, SPEAKS_FOR, draw_verdict_grid, verdict_grid
from vllm_teach.validation.audit.check import DIRECTION, FAILS, HOLDS, OPEN, Undecidable, at_least, near
from vllm_teach.validation.audit.experiment import load_experiments
from vllm_teach.validation.audit.finding import Finding, counted
from vllm_teach.validation.audit.run import RowAudit
from vllm_teach.validation.audit.tolerance import ToleranceSweep
from vllm_teach.validation.audit.verdict import VERDICTS, judge
from vllm_teach.validation.published_runs import PublishedRun
from vllm_teach.validation.tables import load_tables

THREE = near("three times", "ratio", 3.0, 2.0, "why")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def row(table: str, key: str, checks, findings) -> RowAudit:
    return RowAudit(load_experiments().get(table, key), tuple(findings), judge(checks, findings), None, 0.0)


def rows() -> list[RowAudit]:
    half = at_least("half", "saved", 0.5, "why")
    return [
        row("A-overall", "memory_reduction", [half], [counted("saved", 0.75, "", "")]),
        row(
            "B-flash-attention",
            "time_ms",
            [THREE, half],
            [counted("ratio", 9.0, "x", ""), counted("saved", 0.1, "", "")],
        ),
        row("B-flash-attention", "memory_mb", [Undecidable("all", "the batch")], []),
    ]


def test_the_grid_has_every_row_in_its_table_and_every_part() -> None:
    grid = verdict_grid(rows())
    assert [(table, len(squares)) for table, squares in grid.items()] == [("A-overall", 1), ("B-flash-attention", 2)]
    assert grid["B-flash-attention"][0].verdict == "partly"
    assert grid["B-flash-attention"][0].outcomes == (DIRECTION, FAILS)
    assert grid["B-flash-attention"][1].outcomes == (OPEN,)
    with pytest.raises(InvalidArgumentError):
        verdict_grid([])


def test_a_square_has_its_verdicts_colour_and_sign_and_a_dot_for_each_part() -> None:
    ax = draw_verdict_grid(verdict_grid(rows()), title="t").axes[0]
    fills = [to_hex(patch.get_facecolor()) for patch in ax.patches if isinstance(patch, Rectangle)]
    for name in ("confirmed", "partly", "undecided"):
        assert style.colour(name).lower() in fills
    assert [text.get_text() for text in ax.texts] == ["✓", "~", "?"]
    dots = [to_hex(line.get_markerfacecolor()) for line in ax.lines]
    assert len(dots) == 4
    assert dots[1:3] == [style.colour("partly").lower(), style.colour("contradicted").lower()]


def test_every_verdict_has_a_look_and_every_outcome_a_verdict() -> None:
    assert set(LOOKS) == set(VERDICTS) == set(SPEAKS_FOR.values())
    assert set(SPEAKS_FOR) == {HOLDS, DIRECTION, FAILS, OPEN}
    assert len({sign for _, sign in LOOKS.values()}) == 4


def test_a_line_is_cut_where_the_outcome_changes() -> None:
    finding = Finding("ratio", 1.8, "x", "measured here", "", 0.9, 2.4, 5)
    line = check_line(THREE, finding, 0.4, 20.0)
    assert [zone[2] for zone in line.zones] == [FAILS, DIRECTION, HOLDS, DIRECTION]
    assert line.zones[1][1] == pytest.approx(math.sqrt(3), rel=0.01)
    assert line.zones[2][1] == pytest.approx(6.0, rel=0.01)
    assert line.outcome == FAILS  # its spread reaches over no effect
    assert all(first[1] == then[0] for first, then in zip(line.zones, line.zones[1:], strict=False))
    with pytest.raises(InvalidArgumentError):
        check_line(THREE, finding, 0.0, 20.0)


def test_a_lines_finding_stands_at_its_value_with_its_outcome() -> None:
    finding = Finding("ratio", 3.8, "x", "measured here", "", 3.6, 4.3, 5)
    ax = draw_check_lines([check_line(THREE, finding, 0.4, 20.0)], title="t").axes[0]
    assert any(list(line.get_xdata()) == [3.8] for line in ax.lines)
    assert any(list(line.get_xdata()) == [3.6, 4.3] for line in ax.lines)
    assert any(text.get_text().endswith(": holds") for text in ax.texts)


def test_points_lie_on_the_line_of_their_number_in_flight() -> None:
    point = Point(20, 0.5)
    assert point.in_flight == 10
    ax = draw_in_flight_lines({"one": point}, (10,), title="t").axes[0]
    rates, seconds = ax.lines[0].get_data()
    assert all(rate * second == pytest.approx(10) for rate, second in zip(rates, seconds, strict=True))


def test_ratios_cover_each_setting_and_grow_with_length_and_mask() -> None:
    found = {(each.length, each.head_dim, each.mask): each.ratio for each in ratios_by_setting()}
    assert len(found) == len(LENGTHS) * len(HEAD_DIMS) * len(MASKS)
    for length in LENGTHS:
        for head_dim in HEAD_DIMS:
            assert found[length, head_dim, "causal"] > 1.5 * found[length, head_dim, "no mask"]
        # S and P are written and read for each head: twice the heads, about twice the ratio.
        assert found[length, 64, "no mask"] / found[length, 128, "no mask"] == pytest.approx(2, rel=0.1)
    ax = draw_ratios(ratios_by_setting(), 3.0, title="t").axes[0]
    assert len(ax.lines) == 1 + len(found)


def test_facts_are_those_that_a_table_gives() -> None:
    tables = tables_with_numbers(load_tables().values())
    given = published_facts(tables)
    assert len(given) == 10
    assert given["A-llama2-70b-serving"] == ("model", "lengths", "number of requests")  # its hardware was inferred
    assert given["B-flash-attention"] == ("hardware", "lengths")
    assert given["B-customer-service"] == ()
    ax = draw_published_facts(given, title="t").axes[0]
    assert len(ax.texts) == len(given) * len(FACTS) - sum(map(len, given.values()))


def test_readings_draw_both_rates_and_the_ratio() -> None:
    left, right = draw_readings({"one": Reading(50, 200)}, Reading(42, 387), title="t").axes
    assert [bar.get_width() for bar in left.patches] == [50, 200]
    assert [bar.get_width() for bar in right.patches] == [4]


def test_pairs_stand_at_modelled_and_published() -> None:
    run = PublishedRun("lmdeploy", "a100-80gb-sxm", 4, 16, 128, 128, 400.0, "a table")
    pair = Pair(run, 500.0)
    assert pair.ratio == 1.25
    ax = draw_pairs([pair], Reading(42, 387), Reading(184, 1477), title="t").axes[0]
    marks = [line.get_xydata().tolist() for line in ax.lines if line.get_label() in ("lmdeploy", "article A")]
    assert marks == [[[500.0, 400.0]], [[184.0, 42.0], [1477.0, 387.0]]]


def test_tolerance_bars_add_up_to_all_rows() -> None:
    sweep = ToleranceSweep(
        (1, 2), {"confirmed": (1, 2), "partly": (2, 1), "contradicted": (0, 0), "cannot be decided": (0, 0)}
    )
    ax = draw_tolerance(sweep, title="t").axes[0]
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == [1, 2, 2, 1]
    assert max(bar.get_y() + bar.get_height() for bar in ax.patches) == sweep.num_rows
