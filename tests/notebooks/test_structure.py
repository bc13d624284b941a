"""Every lesson has the shape a reader comes to rely on: the opening, the sections in order, exercises, the summary."""

import re

import pytest

from vllm_teach import resources
from vllm_teach.teaching import list_checks, notebook_rules, notebooks

LESSONS = (
    "00_start_here",
    "01_naive_attention",
    "02_online_softmax_and_tiling",
    "03_recomputation_and_training",
    "04_attention_patterns",
    "05_choosing_a_backend",
    "06_paged_kv_cache",
    "07_sharing_copy_on_write_prefix",
    "08_scheduling",
    "09_quantization",
    "10_custom_kernels",
    "11_serving_and_monitoring",
    "12_roofline_and_simulation",
    "13_reference_tables_audited",
)
SECTIONS = (
    "The problem",
    "The idea, by hand",
    "The idea, in code",
    "It is right",
    "It pays",
    "Where it breaks",
    "Exercises",
    "Reference check",
    "In production",
    "Summary",
)
# The first lesson has no idea to derive and nothing yet to compare.
SECTIONS_OF_THE_FIRST = ("Exercises", "Summary")


def lesson(name):
    return notebooks.read(resources.folder("notebooks") / f"{name}.ipynb")


def headings(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", LESSONS)
def test_sections_in_order(name):
    found = headings(lesson(name))
    wanted = SECTIONS_OF_THE_FIRST if name == LESSONS[0] else SECTIONS
    places = []
    for section in wanted:
        matching = [place for place, heading in enumerate(found) if re.match(rf"{section}(:|$)", heading)]
        assert matching, f"{name} needs a heading '## {section}' (a colon and more may follow); it has {found}"
        places += matching  # a section may have several headings, one after the other
    assert places == sorted(places), f"{name}: the sections stand in another order: {found}"


@pytest.mark.parametrize("name", LESSONS)
def test_the_opening(name):
    first = lesson(name).cells[0]
    assert first.cell_type == "markdown"
    opening = first.source
    assert opening.startswith("# ")
    assert "?" in opening, "the opening asks the question of the lesson"
    assert re.search(r"\d+ minutes", opening), "the opening says how many minutes the lesson takes"
    assert re.search(r"able to|you can", opening, re.IGNORECASE), "the opening says what the reader will be able to do"
    if name != LESSONS[0]:
        assert re.search(r"builds on", opening, re.IGNORECASE), "the opening says which lesson it builds on"


@pytest.mark.parametrize("name", LESSONS)
def test_the_system_map_comes_early_and_threads_are_pinned(name):
    cells = [cell.source for _, cell in notebook_rules.code_cells(lesson(name))]
    assert re.search(rf'^begin\("{name}"[,)]', cells[0], re.MULTILINE), "the first code cell ends with begin(lesson)"
    assert any("system_map" in source or "lesson_map" in source for source in cells[:3])


@pytest.mark.parametrize("name", LESSONS)
def test_each_check_of_the_lesson_is_an_exercise_with_a_statement(name):
    notebook = lesson(name)
    exercises = notebook_rules.tagged_names(notebook, "exercise")
    names = [exercise for exercise, _ in exercises]
    assert sorted(names) == sorted(one.name for one in list_checks() if one.lesson == name)
    assert len(names) >= 2
    for exercise, index in exercises:
        assert notebook.cells[index - 1].cell_type == "markdown", f"{exercise} needs its statement in the cell before"
        assert "NotImplementedError" in notebook.cells[index].source, f"{exercise} is a stub"


@pytest.mark.parametrize("name", LESSONS[1:])
def test_the_reference_check_compares(name):
    code = "\n".join(cell.source for _, cell in notebook_rules.code_cells(lesson(name)))
    assert re.search(r"\b(compare|format_verdicts)\(", code)


@pytest.mark.parametrize("name", LESSONS)
def test_a_widget_has_a_static_twin(name):
    source = "\n".join(cell.source for _, cell in notebook_rules.code_cells(lesson(name)))
    assert source.count("explore(") <= source.count("twin(")


def test_lesson_02_has_a_widget():
    assert any("explore(" in cell.source for _, cell in notebook_rules.code_cells(lesson(LESSONS[2])))


def test_every_lesson_is_in_this_list():
    """A new lesson must be added above, or none of these rules would see it."""
    found = {path.stem for path in resources.folder("notebooks").glob("*.ipynb")}
    assert found == set(LESSONS)


def test_markdown_has_the_lessons_voice():
    for name in LESSONS:
        for index, cell in enumerate(lesson(name).cells):
            if cell.cell_type == "markdown":
                prose = re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", "", cell.source, flags=re.DOTALL)
                prose = prose.replace("![", "[")
                assert "!" not in prose, f"{name}, cell {index}: no exclamation marks"
                assert not re.search(r"\b(simply|magic)\b", prose, re.IGNORECASE), f"{name}, cell {index}"
