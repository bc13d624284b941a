"""Exercises and solutions fit one to one, and a solution put in a stub's place makes the lesson's own check say so."""

import ast

import pytest

from vllm_teach import resources
from vllm_teach.teaching import check, list_checks, notebook_rules, notebooks

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
CHECKS = [(one.lesson, one.name) for one in list_checks()]


def read(folder, lesson):
    return notebooks.read(resources.folder("notebooks") / folder / f"{lesson}.ipynb")


def tagged_source(notebook, kind, name):
    """The source of the one cell tagged `<kind>:<name>`, and that of the code cell after it."""
    (index,) = [index for found, index in notebook_rules.tagged_names(notebook, kind) if found == name]
    after = next(cell.source for cell in notebook.cells[index + 1 :] if cell.cell_type == "code")
    return notebook.cells[index].source, after


def signature(source):
    """(name, parameter names) of the function a cell defines."""
    (function,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return function.name, [argument.arg for argument in function.args.args]


@pytest.mark.parametrize("lesson", LESSONS)
def test_one_solution_for_each_check_and_no_other(lesson):
    names = [name for name, _ in notebook_rules.tagged_names(read("solutions", lesson), "solution")]
    assert sorted(names) == sorted(name for of, name in CHECKS if of == lesson)


@pytest.mark.parametrize("lesson", LESSONS)
def test_solutions_follow_the_lessons_order_and_signatures(lesson):
    notebook, solutions = read("", lesson), read("solutions", lesson)
    exercises = [name for name, _ in notebook_rules.tagged_names(notebook, "exercise")]
    assert exercises == [name for name, _ in notebook_rules.tagged_names(solutions, "solution")]
    for name in exercises:
        stub, _ = tagged_source(notebook, "exercise", name)
        answer, _ = tagged_source(solutions, "solution", name)
        assert signature(stub) == signature(answer)


@pytest.mark.parametrize(("lesson", "name"), CHECKS)
def test_the_solution_in_the_stubs_place_is_correct(lesson, name, capsys):
    solutions, notebook = read("solutions", lesson), read("", lesson)
    stub, check_cell = tagged_source(notebook, "exercise", name)
    answer, _ = tagged_source(solutions, "solution", name)
    # Only the imports: the rest of the lesson is nbval's business.
    imports = ast.parse(notebook_rules.code_cells(solutions)[0][1].source)
    imports.body = [node for node in imports.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for source, beginning in ((stub, "Not solved yet: "), (answer, "Correct: ")):
        namespace: dict[str, object] = {}
        exec(compile(imports, "imports", "exec"), namespace)
        getattr(check, name).forget_hints()
        capsys.readouterr()
        exec(source, namespace)
        exec(check_cell, namespace)
        assert capsys.readouterr().out.startswith(beginning)
