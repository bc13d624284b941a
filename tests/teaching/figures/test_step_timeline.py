from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.step_timeline import Step, draw_timeline, record_step, step_table, timeline

STEPS = [
    Step(0.2, {"A": 36, "B": 4}, {}),
    Step(0.05, {}, {"A": 1, "B": 1}),
    Step(0.15, {"C": 8}, {"A": 1}),
    Step(0.05, {}, {"A": 1, "C": 1}),
]


def item(seq_id: int, tokens: int, prefill: bool) -> Any:
    return SimpleNamespace(sequence=SimpleNamespace(seq_id=seq_id), num_tokens=tokens, is_decode=not prefill)


def test_bars_follow_one_another_to_scale() -> None:
    data = timeline(STEPS)
    assert data.edges == pytest.approx((0, 0.2, 0.25, 0.4, 0.45))
    c = [bar for bar in data.bars if bar.request == "C"]
    assert [(bar.start, bar.tokens, bar.phase) for bar in c] == [
        (pytest.approx(0.25), 8, "prefill"),
        (pytest.approx(0.4), 1, "decode"),
    ]
    assert data.prefill_rate == pytest.approx((40 + 9) / 0.35)
    assert data.decode_rate == pytest.approx(4 / 0.1)


def test_the_drawing_is_to_scale_in_milliseconds() -> None:
    figure, data = draw_timeline(STEPS)
    drawn = [
        (patch.get_x(), patch.get_width(), to_hex(patch.get_facecolor()).upper())
        for patch in figure.axes[0].patches
        if isinstance(patch, Rectangle)
    ]
    wanted = [(1e3 * b.start, 1e3 * b.seconds, style.colour(b.phase)) for b in data.bars]
    assert [(pytest.approx(x), pytest.approx(w), fill) for x, w, fill in wanted] == drawn
    assert figure.axes[0].get_xlabel() == "time since the first step (ms)"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["A", "B", "C"]
    plt.close(figure)


def test_the_table_has_the_counts_and_no_times() -> None:
    assert step_table(STEPS).splitlines() == [
        "step     A     B     C   computed",
        "   1    36     4     .    40 (prefill)",
        "   2     1     1     .     2 (decode)",
        "   3     1     .     8     9 (prefill + decode)",
        "   4     1     .     1     2 (decode)",
    ]


def test_a_step_is_recorded_under_the_requests_names() -> None:
    engine: Any = SimpleNamespace(
        last_step=SimpleNamespace(seconds=0.5),
        last_plan=SimpleNamespace(items=[item(3, 1, False), item(5, 7, True), item(9, 1, False)]),
    )
    requests: Any = {
        "A": SimpleNamespace(sequences=[SimpleNamespace(seq_id=3)]),
        "B": SimpleNamespace(sequences=[SimpleNamespace(seq_id=5)]),
    }
    assert record_step(engine, requests) == Step(0.5, {"B": 7}, {"A": 1})


def test_the_sequences_of_one_request_add_up() -> None:
    items = [item(0, 10, True), item(1, 10, True), item(2, 4, True), item(3, 1, False), item(4, 1, False)]
    engine: Any = SimpleNamespace(last_step=SimpleNamespace(seconds=0.5), last_plan=SimpleNamespace(items=items))
    requests: Any = {
        name: SimpleNamespace(sequences=[SimpleNamespace(seq_id=i) for i in ids])
        for name, ids in {"A": (0, 1), "B": (2, 3, 4)}.items()
    }
    step = record_step(engine, requests)
    assert step == Step(0.5, {"A": 20, "B": 4}, {"B": 2})
    assert step_table([step]).splitlines()[1] == "   1    20     6    26 (prefill + decode)"


def test_an_engine_that_made_no_step_is_refused() -> None:
    engine: Any = SimpleNamespace(last_step=None)
    with pytest.raises(InvalidArgumentError, match="no step yet"):
        record_step(engine, {})


@pytest.mark.parametrize("steps", [[], STEPS[:1], STEPS[1:2]])
def test_rates_need_both_kinds_of_step(steps: list[Step]) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one prefill"):
        timeline(steps)
