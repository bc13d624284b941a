import os
from functools import partial

from vllm_teach.validation.gpu.sections import Item, Section, run_sections


class Clock:
    """A clock that moves only when an item says how long it took."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def item(self, name: str, seconds: float, error: Exception | None = None) -> Item:
        def run() -> list[dict]:
            self.now += seconds
            if error is not None:
                raise error
            return [{"kind": "time", "name": name}]

        return Item(name, run)


def sections_of(*items: list[Item], seconds: float = 47.0) -> list[Section]:
    return [Section(f"section {index}", "about", seconds, partial(list, one)) for index, one in enumerate(items)]


def test_items_run_in_order_and_their_records_are_kept():
    clock, seen = Clock(), []
    sections = sections_of([clock.item("a", 1), clock.item("b", 2)], [clock.item("c", 3)])
    results = run_sections(sections, 100, lambda done: seen.append([one.name for one in done]), clock=clock)
    assert [[record["name"] for record in one.records] for one in results] == [["a", "b"], ["c"]]
    assert [one.seconds for one in results] == [3, 3]
    assert seen == [["section 0"], ["section 0", "section 1"]]  # each time all there is so far


def test_a_failure_is_recorded_with_its_traceback_and_the_rest_runs():
    clock = Clock()
    error = ValueError("out of range\nand more")
    sections = sections_of([clock.item("bad", 1, error), clock.item("good", 1)], [clock.item("later", 1)])
    first, second = run_sections(sections, 100, lambda done: None, clock=clock)
    assert [record["name"] for record in first.records] == ["good"]
    (failure,) = first.failures
    assert (failure["item"], failure["error"]) == ("bad", "ValueError: out of range")
    assert "raise error" in failure["traceback"]
    assert len(second.records) == 1


def test_a_list_of_items_that_cannot_be_made_is_a_failure_too():
    def broken() -> list[Item]:
        raise KeyError("no such kernel")

    clock = Clock()
    sections = [Section("broken", "about", 1, broken), *sections_of([clock.item("later", 1)])]
    first, second = run_sections(sections, 100, lambda done: None, clock=clock)
    assert first.failures[0]["error"] == "KeyError: 'no such kernel'"
    assert len(second.records) == 1


def test_a_section_ends_with_its_share_of_the_time_and_names_what_it_left_out():
    clock = Clock()
    items = [clock.item(str(i), 10) for i in range(9)]
    first, second = run_sections(sections_of(items, [clock.item("later", 1)]), 100, lambda done: None, clock=clock)
    assert len(first.records) == 5  # 47 of 100 seconds are its share; the fifth began before they were over
    assert first.not_run == ["5", "6", "7", "8"]
    assert len(second.records) == 1


def test_time_that_one_section_left_goes_to_the_next():
    clock = Clock()
    items = [clock.item(str(i), 10) for i in range(12)]
    _, second = run_sections(sections_of([clock.item("short", 4)], items), 100, lambda done: None, clock=clock)
    assert len(second.records) == 9  # from second 4 to second 94


def test_nothing_starts_beyond_the_limit_which_counts_from_the_start_of_the_process():
    clock = Clock()
    (only,) = run_sections(
        sections_of([clock.item("a", 1)]), 100, lambda done: None, started=clock.now - 95, clock=clock
    )
    assert only.not_run == ["a"]
    assert only.records == []


def test_items_run_in_processes_of_their_own():
    """Functions of the standard library, as a new process must find them by name."""
    items = [
        Item("nothing", partial(list)),
        Item("a number", partial(int, "no number")),
        Item("records", partial(list, [{"kind": "rate", "name": "one"}])),
        Item("dies", partial(os._exit, 3)),
        Item("afterwards", partial(list, [{"kind": "rate", "name": "two"}])),
    ]
    section = Section("parallel", "about", 10, lambda: items, workers=1)
    (result,) = run_sections([section], 600, lambda done: None)
    assert [record["name"] for record in result.records] == ["one", "two"]
    assert [failure["item"] for failure in result.failures] == ["a number", "dies"]
    assert result.failures[0]["error"].startswith("ValueError: invalid literal")
    assert "BrokenProcessPool" in result.failures[1]["error"]
    assert result.not_run == []


def test_processes_start_nothing_when_the_time_is_over():
    clock = Clock()
    section = Section("parallel", "about", 10, lambda: [Item("late", partial(list))], workers=1)
    (result,) = run_sections([section], 10, lambda done: None, started=clock.now - 20, clock=clock)
    assert result.not_run == ["late"]
