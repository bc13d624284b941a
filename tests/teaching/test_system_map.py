import itertools
import re
from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.diagram import LOOKS, Arrow, Box, route
from vllm_teach.teaching.figures.lesson_map import LESSONS, lesson_map
from vllm_teach.teaching.system_map import ROOMS, draw_lesson_map, draw_system_map, system_map

# The rooms of the house plan, each of which has a place on the map.
DESIGN = (
    "counters kernels parallel attention kvcache quantization backends models engine performance serving validation "
    "teaching training cli"
)
BOTH = [system_map("attention"), lesson_map(["00", "01", "02"], here="01")]


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def on_border(box: Box, point: tuple[float, float]) -> bool:
    x, y = point
    inside = box.x - 1e-9 <= x <= box.x + box.w + 1e-9 and box.y - 1e-9 <= y <= box.y + box.h + 1e-9
    edges = (x - box.x, x - box.x - box.w, y - box.y, y - box.y - box.h)
    return inside and min(map(abs, edges)) < 1e-9


def crosses(arrow: Arrow, box: Box) -> bool:
    """Whether a stretch of the arrow runs through the box's inside."""
    for (x0, y0), (x1, y1) in itertools.pairwise(arrow.points):
        left, right, low, high = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
        e = 1e-9
        if left < box.x + box.w - e and right > box.x + e and low < box.y + box.h - e and high > box.y + e:
            return True
    return False


@pytest.mark.parametrize("data", BOTH, ids=["system", "lessons"])
def test_no_two_boxes_overlap_and_all_lie_on_the_page(data) -> None:
    for a, b in itertools.combinations(data.boxes, 2):
        assert not a.overlaps(b), f"{a.name} lies over {b.name}"
    width, height = data.size
    for box in data.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.w <= width
        assert box.y + box.h <= height


@pytest.mark.parametrize("data", BOTH, ids=["system", "lessons"])
def test_arrows_go_from_border_to_border_round_the_boxes_at_right_angles(data) -> None:
    boxes = {box.name: box for box in data.boxes}
    for arrow in data.arrows:
        assert on_border(boxes[arrow.source], arrow.points[0]), arrow
        assert on_border(boxes[arrow.target], arrow.points[-1]), arrow
        for box in data.boxes:
            assert not crosses(arrow, box), f"{arrow.source} -> {arrow.target} runs through {box.name}"
        for (x0, y0), (x1, y1) in itertools.pairwise(arrow.points):
            assert abs(x0 - x1) < 1e-9 or abs(y0 - y1) < 1e-9, arrow


def test_the_way_of_a_request_is_drawn() -> None:
    drawn = {(arrow.source, arrow.target) for arrow in system_map().arrows}
    way = ["request", "tokenizer", "scheduler", "model_runner", "sampler", "detokenizer", "output"]
    assert set(itertools.pairwise(way)) <= drawn
    assert {("sampler", "scheduler"), ("scheduler", "kv_cache"), ("attention", "kv_cache")} <= drawn


def test_every_room_of_the_design_has_a_place_and_every_place_a_room() -> None:
    placed = {room.split(".")[0] for rooms in ROOMS.values() for room in rooms}
    assert placed == set(DESIGN.split())
    assert set(ROOMS) == {box.name for box in system_map().boxes}


def test_the_engine_frame_holds_the_engine_and_nothing_else() -> None:
    data = system_map()
    x, y, w, h = data.frame
    inside = {b.name for b in data.boxes if x < b.x and b.x + b.w < x + w and y < b.y and b.y + b.h < y + h}
    assert inside == {"scheduler", "kv_cache", "model_runner", "attention", "sampler", "quantization"}
    loop = next(arrow for arrow in data.arrows if arrow.source == "sampler" and arrow.target == "scheduler")
    assert all(y < point[1] < y + h for point in loop.points)
    frame = Box("frame", "", "", x, y, w, h)
    assert not any(frame.overlaps(b) for b in data.boxes if b.name not in inside)


def test_highlight() -> None:
    looks = {box.name: box.look for box in system_map(["kv_cache", "kernels"]).boxes}
    assert [name for name, look in looks.items() if look == "here"] == ["kv_cache", "kernels"]
    assert set(looks.values()) == {"here", "room"}
    assert system_map(["kv_cache", "kernels"]).title == "You are here: KV cache and kernels"


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"highlight='gpu'.*kv_cache"):
        system_map("gpu")


def test_text_contrast() -> None:
    for name, look in LOOKS.items():
        assert style.contrast(look.ink, look.fill) >= 4.5, name


def check_texts(figure: Figure, boxes: tuple[Box, ...]) -> int:
    """Every text of a box lies within it with some air, no two texts overlap, and none is tiny; returns how many."""
    figure.draw_without_rendering()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi
    by_name = {box.name: box for box in boxes}
    extents = [(text, text.get_window_extent(renderer)) for text in figure.axes[0].texts if text.get_text()]
    for (one, a), (two, b) in itertools.combinations(extents, 2):
        assert not a.overlaps(b), f"{one.get_text()!r} lies over {two.get_text()!r}"
    count = 0
    for text, extent in extents:
        assert text.get_size() >= 8.5
        assert extent.x0 >= 0
        assert extent.x1 <= figure.bbox.x1
        if text.get_gid() in by_name:
            box, air = by_name[text.get_gid()], 0.03
            assert extent.x0 / scale >= box.x + air, text.get_text()
            assert extent.x1 / scale <= box.x + box.w - air, text.get_text()
            assert extent.y0 / scale >= box.y, text.get_text()
            assert extent.y1 / scale <= box.y + box.h, text.get_text()
            count += 1
    return count


def test_system_map_texts_fit_their_boxes() -> None:
    figure, data = draw_system_map("attention")
    assert check_texts(figure, data.boxes) == 2 * len(data.boxes)


def test_lesson_map_texts_fit_their_boxes() -> None:
    figure, data = draw_lesson_map(["00_start_here"], here="00")
    assert check_texts(figure, data.boxes) == 2 * len(data.boxes)


def test_lessons_are_numbered_and_build_on_earlier_ones() -> None:
    assert [lesson.number for lesson in LESSONS] == [f"{i:02}" for i in range(14)]
    data = lesson_map([])
    for lesson in LESSONS[1:]:
        earlier = data.builds_on(lesson.number)
        assert earlier, f"{lesson.number} hangs in the air"
        assert all(number < lesson.number for number in earlier)
    assert data.builds_on("02") == ("01",)


def test_available_lessons_are_filled_and_the_others_planned() -> None:
    data = lesson_map(["00_start_here", "01_naive_attention.ipynb", "02"])
    assert data.available == ("00", "01", "02")
    assert [box.name for box in data.boxes if box.look == "room"] == ["00", "01", "02"]
    assert sum(box.look == "planned" for box in data.boxes) == 11
    assert data.title == "3 of 14 lessons are here, the others are planned"
    assert {a.target for a in data.arrows if not a.quiet} == {"01", "02"}
    assert lesson_map([lesson.number for lesson in LESSONS]).title == "14 of 14 lessons are here"


def test_an_unknown_lesson_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape("lesson '14_more' is not on the map")):
        lesson_map(["14_more"])


def test_maps_are_reproducible() -> None:
    assert style.to_png(draw_system_map("sampler")[0]) == style.to_png(draw_system_map("sampler")[0])
    assert style.to_png(draw_system_map("sampler")[0]) != style.to_png(draw_system_map("scheduler")[0])


def test_route_turns() -> None:
    a, b = Box("a", "", "", 0, 0, 1, 1), Box("b", "", "", 3, 2, 1, 1)
    assert route(a, "right", b, "left").points == ((1, 0.5), (2, 0.5), (2, 2.5), (3, 2.5))
    assert route(a, "top", b, "left").points == ((0.5, 1), (0.5, 2.5), (3, 2.5))
    assert route(a, "right", b, "bottom", at=(0.5, 0.25)).points == ((1, 0.5), (3.25, 0.5), (3.25, 2))
    assert route(a, "top", b, "bottom", via=1.2).points == ((0.5, 1), (0.5, 1.2), (3.5, 1.2), (3.5, 2))
