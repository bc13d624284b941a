"""Each rule is broken on purpose, one at a time, in a notebook that passes them all."""

import ast

import nbformat.v4 as v4
import pytest

from vllm_teach.teaching import notebook_rules as rules
from vllm_teach.teaching.canonical import WIDGET_VIEW

FIGURE = {"image/png": "aGVsbG8=", "text/plain": "<Figure size 640x480 with 1 Axes>"}


def stream(text: str, name: str = "stdout"):
    return v4.new_output("stream", name=name, text=text)


def code(source: str, *outputs, tags=(), count: int | None = 1):
    cell = v4.new_code_cell(source, outputs=list(outputs), execution_count=count)
    cell.metadata["tags"] = list(tags)
    return cell


def good_cells():
    return [
        code("import math\nprint(1)", stream("1\n")),
        code("plot()", stream("peak 3.5\n"), v4.new_output("display_data", dict(FIGURE))),
        code("time_median(f)", stream("0.2 s\n"), tags=["nbval-ignore-output"]),
        code("def f(x):\n    raise NotImplementedError", tags=["exercise:f"]),
        code("check.f(f)", stream("Not solved yet: f.\n")),
    ]


def problems_with(cell):
    """The complaints about a notebook in which `cell` was put between good ones."""
    cells = good_cells()
    return rules.cell_problems(v4.new_notebook(cells=[cells[0], cell, *cells[1:]]))


def test_a_good_notebook_passes():
    assert rules.cell_problems(v4.new_notebook(cells=good_cells())) == []


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        (code("x = 1"), "no compared output"),
        (code("x = 1", stream("  \n")), "no compared output"),
        (code("x", stream("careful\n", "stderr")), "no compared output"),
        (code("f()", stream("1\n"), stream("careful\n", "stderr")), "wrote to stderr"),
        (code("plot()", v4.new_output("display_data", dict(FIGURE))), "shows a picture"),
        (code("plot()", stream("done\n"), v4.new_output("display_data", dict(FIGURE))), "shows a picture"),
        (code("w", v4.new_output("display_data", {WIDGET_VIEW: {}, "text/plain": "a slider"})), "shows a picture"),
        (code("print(1)", stream("1\n"), tags=["nbval-skip"]), "nbval-skip"),
        (code("# NBVAL_IGNORE_OUTPUT\nprint(1)", stream("1\n")), "marker in a comment"),
        (code("print(1)", count=None), "was not run"),
        (code("print(random())", stream("0.4\n"), tags=["nbval-ignore-output"]), "measures nothing"),
        (code("print(time.perf_counter())", stream("3\n")), "reads a clock"),
        (code("from math import pi\nprint(pi)", stream("3.14\n")), "imports"),
        (code("def f():\n    import math\nprint(1)", stream("1\n")), "imports"),
        (code("%matplotlib inline\nprint(1)", stream("1\n")), "not plain Python"),
        (code("print(1)\n" * 16, stream("1\n" * 16)), "16 lines of code"),
        (code("print(p)", stream("/home/ada/model 1\n")), "absolute path"),
        (code("def g(x): ...", tags=["exercise:g"]), "does not call check.g"),
        (code("def g(x): ...", tags=["solution:g"]), "does not call check.g"),
    ],
)
def test_each_broken_rule_is_named(cell, complaint):
    problems = problems_with(cell)
    assert any(complaint in problem for problem in problems), problems


def test_a_check_must_have_said_what_its_kind_says():
    cells = [code("def f(x): ...", tags=["solution:f"]), code("check.f(f)", stream("Not right yet: 1\n"))]
    problems = rules.cell_problems(v4.new_notebook(cells=cells))
    assert problems == ["the check after cell 0 (solution:f) does not print 'Correct'."]


@pytest.mark.parametrize(
    "source",
    [
        "print(llm.generate('x')[0].outputs[0].text)",
        "for i, x in enumerate(y): print(x)",
        "print(decorate(x))",
        "print('the time of one step', f(x))",
        "# compare(this)\nprint(f(x))",
        "print(information)",
        "print(lifetime, inseparable)",
    ],
)
def test_a_cell_that_measures_nothing_may_not_be_ignored(source):
    cell = code(source, stream("generated text\n"), tags=["nbval-ignore-output"])
    assert any("measures nothing" in problem for problem in problems_with(cell))


@pytest.mark.parametrize(
    "source",
    [
        "print(performance.time_median(f).median)",
        "machine = measure_this_machine()\nprint(machine.describe())",
        "compare('A-overall', {})",
        "print(format_verdicts(audit, 'A-overall'))",
        "print(engine.last_step.seconds)",
        "print(prefill_seconds)",
        "figure, clock = step_timeline.draw_timeline(steps)",
        "print(naive_peak)",
        "print(time.perf_counter() - start)",
        "print(f'rounding: {our_error:.1e}')",
    ],
)
def test_a_cell_that_measures_may_be_ignored(source):
    assert problems_with(code(source, stream("1\n"), tags=["nbval-ignore-output"])) == []


def test_only_what_must_not_be_written_is_an_obstacle():
    cells = [
        code("print(1)\n" * 16, stream("1\n")),
        code("f()", stream("careful\n", "stderr")),
        code("print(p)", stream("/home/ada/stderr 1\n")),
        code("import stderr", stream("1\n")),
    ]
    problems = rules.untidy(v4.new_notebook(cells=cells))
    assert [isinstance(problem, rules.Obstacle) for problem in problems] == [False, True, True, False]


def test_at_most_a_third_may_be_ignored():
    timed = [code("time_median(f)", stream("1 s\n"), tags=["nbval-ignore-output"]) for _ in range(2)]
    seen = [code("print(1)", stream("1\n")) for _ in range(2)]
    assert rules.uncompared(v4.new_notebook(cells=[*timed[:1], *seen])) == []
    assert "2 of 3" in rules.uncompared(v4.new_notebook(cells=[*timed, *seen[:1]]))[0]


def test_blank_lines_comments_docstrings_and_imports_are_not_counted():
    source = "import math\nfrom a import (\n    b,\n)\n"
    source += 'def f():\n    """One.\n\n    Two.\n    """\n    # why\n\n    return 1\nprint(f())'
    assert rules.code_lines(source, ast.parse(source)) == 3


def test_markdown_is_left_alone():
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# NBVAL_SKIP\nimport x"), *good_cells()])
    assert rules.cell_problems(notebook) == []
