"""The rules a lesson's cells keep, as functions from a notebook to a list of sentences; an empty list is a pass.

What nbval 0.11 does not compare decides most of them: it skips pictures, widget views, cells without an execution
count and, of course, cells told to be skipped or ignored. A wrong result that only shows there would never be noticed.
"""

import ast
import itertools
import re
from typing import Any

from vllm_teach.teaching.canonical import WIDGET_VIEW, absolute_paths, output_texts

IGNORE_TAG = "nbval-ignore-output"
MAX_CODE_LINES = 15
MAX_IGNORED_SHARE = 1 / 3

# nbval's IPyNbFile.skip_compare, and the keys that are no text.
NOT_COMPARED = frozenset({WIDGET_VIEW, "image/png", "image/jpeg"})

# What IPython prints for an object that has only a picture to show: it says nothing about the picture.
_EMPTY_REPR = re.compile(r"\s*<(Figure size|IPython\.core\.display\.Image object|PIL\.)[^>]*>\s*")
_MARKER = re.compile(
    r"^\s*#+\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$",
    re.MULTILINE,
)
_FORBIDDEN_TAGS = frozenset(
    {"nbval-skip", "nbval-check-output", "nbval-raises-exception", "pytest-validate-ignore-output"}
)
# What a cell must call, or which attribute or variable it must use, for its output to differ between machines.
_MEASURING_CALLS = re.compile(
    r"time_median|measure_\w+|peak_memory|trace_memory|compare|perf_counter|process_time|monotonic|describe_environment"
    r"|format_verdicts|draw_(timeline|time_per_token|measured_shares|roofline|growth)"
)
_MEASURED_NAMES = re.compile(r"seconds|peak|\w+_(seconds|peak|error)")
_CLOCK = re.compile(r"\b(perf_counter|process_time|monotonic|timeit|time\.time)\b|^%%?time", re.MULTILINE)


class Obstacle(str):
    """A broken rule that keeps a freshly run notebook from being written; the others are told after the writing."""


def code_cells(notebook: Any) -> list[tuple[int, Any]]:
    """The code cells with their index among all cells."""
    return [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def is_ignored(cell: Any) -> bool:
    """True where nbval runs the cell but does not look at what it prints."""
    return IGNORE_TAG in tags(cell)


def tagged_names(notebook: Any, kind: str) -> list[tuple[str, int]]:
    """(name, cell index) of every cell tagged `<kind>:<name>`; kind is "exercise" or "solution"."""
    prefix = f"{kind}:"
    return [
        (tag.removeprefix(prefix), index)
        for index, cell in code_cells(notebook)
        for tag in tags(cell)
        if tag.startswith(prefix)
    ]


def compared_values(cell: Any) -> dict[str, list[str]]:
    """What nbval compares of a cell: stream name or mime type -> the texts, in order."""
    values: dict[str, list[str]] = {}
    for output in cell.outputs:
        if output.output_type == "stream":
            values.setdefault(output.name, []).append(output.text)
        elif output.output_type == "error":
            values.setdefault("error", []).append(f"{output.ename}: {output.evalue}")
        else:
            for kind, value in output.data.items():
                if kind not in NOT_COMPARED:
                    values.setdefault(kind, []).append(str(value))
    return values


def telling_texts(cell: Any) -> list[str]:
    """The compared texts that say something: not blank, not stderr, not `<Figure size …>`."""
    texts = [text for kind, values in compared_values(cell).items() if kind != "stderr" for text in values]
    return [text for text in texts if text.strip() and not _EMPTY_REPR.fullmatch(text)]


def has_picture(cell: Any) -> bool:
    """True for a cell whose output holds a picture or a widget."""
    return any(kind in NOT_COMPARED for output in cell.outputs for kind in output.get("data", {}))


def uncompared(notebook: Any) -> list[str]:
    """Code cells whose output could change without nbval noticing."""
    problems = []
    cells = code_cells(notebook)
    for index, cell in cells:
        where = f"cell {index}"
        for tag in sorted(_FORBIDDEN_TAGS.intersection(tags(cell))):
            problems.append(f"{where} has the tag {tag}, which switches its comparison: remove it.")
        if _MARKER.search(cell.source):
            problems.append(f"{where} has an nbval marker in a comment: use the tag {IGNORE_TAG} for a timing cell.")
        if cell.execution_count is None:
            problems.append(f"{where} was not run, and nbval compares only cells that were: run the build command.")
            continue
        if is_ignored(cell):
            if not measures(cell.source):
                problems.append(f"{where} is tagged {IGNORE_TAG} but measures nothing: print something stable instead.")
            continue
        is_answer = any(tag.startswith(("exercise:", "solution:")) for tag in tags(cell))
        texts = telling_texts(cell)
        if has_picture(cell) and not any(re.search(r"\d", text) for text in texts):
            problems.append(
                f"{where} shows a picture, which nbval does not compare: print a number of the figure's data."
            )
        elif not texts and not is_answer:  # an answer's output is that of the check in the next cell
            problems.append(f"{where} has no compared output: end it with a print or an expression.")
        if _CLOCK.search(cell.source):
            problems.append(f"{where} reads a clock but is compared: tag it {IGNORE_TAG} or count instead of timing.")
    ignored = sum(is_ignored(cell) for _, cell in cells)
    if ignored > MAX_IGNORED_SHARE * len(cells):
        problems.append(f"{ignored} of {len(cells)} code cells are ignored; at most a third may be.")
    return problems


def measures(source: str) -> bool:
    """True for code that takes a time, a peak, a rate or a rounding error, or shows one. Strings do not count."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return False  # which `untidy` reports
    calls = [_last_name(node.func) for node in nodes if isinstance(node, ast.Call)]
    names = [_last_name(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    return any(map(_MEASURING_CALLS.fullmatch, calls)) or any(map(_MEASURED_NAMES.fullmatch, names))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def untidy(notebook: Any) -> list[str]:
    """Cells that are too long, import in the middle, write to stderr or print a path of one machine."""
    problems = []
    for position, (index, cell) in enumerate(code_cells(notebook)):
        where = f"cell {index}"
        try:
            tree = ast.parse(cell.source)
        except SyntaxError as error:
            problems.append(f"{where} is not plain Python ({error.msg}, line {error.lineno}): lessons use no magics.")
            continue
        lines = code_lines(cell.source, tree)
        if lines > MAX_CODE_LINES:
            problems.append(f"{where} has {lines} lines of code; at most {MAX_CODE_LINES}: one cell, one step.")
        if position > 0 and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree)):
            problems.append(f"{where} imports; imports stand in the first code cell.")
        if any(o.output_type == "stream" and o.name == "stderr" for o in cell.outputs):
            problems.append(Obstacle(f"{where} wrote to stderr: silence the warning or progress bar at its source."))
        for path in dict.fromkeys(path for text in output_texts(cell) for path in absolute_paths(text)):
            problems.append(Obstacle(f"{where} prints the absolute path {path}: print its name only."))
    return problems


def code_lines(source: str, tree: ast.Module) -> int:
    """Lines that are neither blank, nor only a comment, nor part of a docstring or an import."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            left_out.update(_lines(node.body[0]))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(_lines(node))
    return sum(
        1
        for number, line in enumerate(source.splitlines(), start=1)
        if line.strip() and not line.strip().startswith("#") and number not in left_out
    )


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def unchecked_answers(notebook: Any, kind: str) -> list[str]:
    """Cells tagged `<kind>:<name>` that are not directly followed by a cell calling `check.<name>(…)`."""
    problems = []
    cells = code_cells(notebook)
    following = {index: after for (index, _), (_, after) in itertools.pairwise(cells)}
    wanted = "Not solved yet" if kind == "exercise" else "Correct"
    for name, index in tagged_names(notebook, kind):
        after = following.get(index)
        if after is None or not re.search(rf"\bcheck\.{re.escape(name)}\(", after.source):
            problems.append(f"cell {index} is tagged {kind}:{name}, but the next code cell does not call check.{name}.")
        elif not any(text.startswith(wanted) for text in telling_texts(after)):
            problems.append(f"the check after cell {index} ({kind}:{name}) does not print {wanted!r}.")
    return problems


def cell_problems(notebook: Any) -> list[str]:
    """All of the above."""
    return (
        uncompared(notebook)
        + untidy(notebook)
        + unchecked_answers(notebook, "exercise")
        + unchecked_answers(notebook, "solution")
    )
