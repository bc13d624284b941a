import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from vllm_teach.engine.events import (
    Admitted,
    Arrived,
    BroughtBack,
    EventLog,
    Finished,
    FirstToken,
    Preempted,
    Scheduled,
    StepEnded,
)
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.request_timeline import LOOKS, TimelineBar, draw_request_timeline, request_timeline

ENDED = StepEnded(0, 0, 20, 1, 0, 0)
EVENTS = [
    (0, 10.0, Arrived(5, 6)),
    (0, 10.0, Arrived(3, 2)),
    (1, 10.1, Admitted(5, 0)),
    (1, 10.1, Scheduled(5, 0, 4)),
    (1, 10.2, ENDED),
    (2, 10.25, Admitted(3, 0)),
    (2, 10.25, Scheduled(5, 4, 2)),
    (2, 10.25, Scheduled(3, 0, 2)),
    (2, 10.3, FirstToken(5)),
    (2, 10.3, FirstToken(3)),
    (2, 10.3, ENDED),
    (3, 10.4, Preempted(3, "swap", 2, "swap")),
    (4, 10.6, BroughtBack(3)),
    (5, 10.8, Preempted(3, "recompute", 2, "swap")),
    (5, 10.9, Finished(5, "stop")),
]


def small_log(events=EVENTS, stretch: float = 1.0) -> EventLog:
    times = iter([time for _, time, _ in events])
    log = EventLog(clock=lambda: stretch * next(times))
    for step, _, event in events:
        log.step = step
        log.record(event)
    return log


def test_bars_are_the_phases_in_order_of_arrival() -> None:
    data = request_timeline(small_log(), {5: "A"})
    assert data.rows == ("sequence 3", "A")  # they arrived together: by id
    assert data.seconds == pytest.approx(0.9)
    bars = [(bar.row, bar.phase, round(bar.start, 6), round(bar.seconds, 6)) for bar in data.bars]
    assert sorted(bars, key=lambda bar: (bar[0], bar[2])) == [
        (0, "queue", 0, 0.25),
        (0, "prefill", 0.25, 0.05),
        (0, "decode", 0.3, 0.1),
        (0, "swapped", 0.4, 0.2),
        (0, "decode", 0.6, 0.2),
        (0, "preempted", 0.8, 0.1),
        (1, "queue", 0, 0.1),
        (1, "prefill", 0.1, 0.2),
        (1, "decode", 0.3, 0.6),
    ]
    assert [bar.cuts for bar in data.bars if bar.cuts] == [(pytest.approx(0.25),)]


def test_it_is_drawn_to_scale_and_a_hatch_tells_the_ways_of_waiting_apart() -> None:
    data = request_timeline(small_log())
    figure = draw_request_timeline(data)
    [ax] = figure.axes
    patches = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    for bar, patch in zip(data.bars, patches, strict=True):
        assert patch.get_x() == pytest.approx(1e3 * bar.start)
        assert patch.get_width() == pytest.approx(1e3 * bar.seconds)
        assert patch.get_y() + patch.get_height() / 2 == pytest.approx(bar.row)
        assert to_hex(patch.get_facecolor()).upper() == LOOKS[bar.phase]["facecolor"].upper()
    assert [line.get_xdata()[0] for line in ax.lines] == [pytest.approx(250)]
    assert ax.get_xlabel() == "time (ms)"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["queue", "prefill", "decode", "preempted (computed again)", "swapped to the host"]
    plt.close(figure)


def test_seconds_from_one_second_on() -> None:
    data = request_timeline(small_log(stretch=10))
    figure, ax = plt.subplots()
    assert draw_request_timeline(data, ax) is figure
    assert ax.get_xlabel() == "time (s)"
    assert ax.get_xlim() == pytest.approx((0, 9))
    plt.close(figure)


def test_phases_keep_their_colours_and_waiting_is_hatched() -> None:
    assert LOOKS["prefill"]["facecolor"] == style.colour("prefill")
    assert LOOKS["decode"]["facecolor"] == style.colour("decode")
    assert LOOKS["preempted"]["hatch"] != LOOKS["swapped"]["hatch"]


def test_many_rows_have_every_other_label() -> None:
    log = EventLog(clock=iter(range(100)).__next__)
    for seq_id in range(30):
        log.record(Arrived(seq_id, 1))
    data = request_timeline(log)
    assert data.bars[0] == TimelineBar(0, "queue", 0, 29)
    figure = draw_request_timeline(data)
    assert len(figure.axes[0].get_yticks()) == 15
    plt.close(figure)


def test_a_log_without_a_sequence() -> None:
    with pytest.raises(InvalidArgumentError, match="tells of no sequence"):
        request_timeline(EventLog())
