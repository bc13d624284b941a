"""No cell of a committed notebook can change unnoticed: proven on synthetic notebooks, then required of the real ones.

The synthetic half runs nbval itself, with the very options of `make test`, and shows what it does and does not notice.
The rules in `teaching.notebook_rules` close each of its gaps.
"""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import nbformat.v4 as v4
import pytest
from nbformat import NotebookNode

from vllm_teach.teaching import canonical, notebook_rules, notebooks

COMMITTED = notebooks.all_notebooks()

PLOT = "import matplotlib.pyplot as plt\nplt.figure()\nplt.plot([1, 4])\nprint('peak', 4)"
WIDGET = """
import matplotlib.pyplot as plt
from vllm_teach.teaching import explore, figure_png
explore(lambda state: figure_png(plt.figure()), readout=lambda state: f"bytes {2 * state['n']}", n=range(1, 5))
"""
# One cell each: its source, the edit of its committed output that stands for a result gone wrong (None: see `spoil`),
# and whether nbval notices.
SYNTHETIC = {
    "print": ("print(6 * 7)", ("42", "43"), True),
    "value": ("6 * 7", ("42", "43"), True),
    "address": ("object()", ("0x000000000000", "0x7fffdeadbeef"), False),
    "digits": ("print(0.12345678, 0x1F)", ("0.12345678", "0.12345679"), True),
    "picture": (PLOT, None, False),
    "picture_number": (PLOT, ("peak 4", "peak 5"), True),
    "widget_number": (WIDGET, ("bytes 2", "bytes 3"), True),
    "nothing": ("x = 1", None, False),
    "unrun": ("print(6 * 7)", None, False),
}


def spoil(notebook):
    """A copy in which every cell's committed result is wrong."""
    wrong = copy.deepcopy(notebook)
    for (name, (_, edit, _)), cell in zip(SYNTHETIC.items(), wrong.cells, strict=True):
        if edit is not None:
            text = json.dumps(cell.outputs)
            assert edit[0] in text, name
            cell.outputs = [NotebookNode(output) for output in json.loads(text.replace(*edit))]
        elif name == "picture":
            cell.outputs[-1].data["image/png"] = "aGVsbG8="
        elif name == "unrun":
            cell.outputs, cell.execution_count = [], None
    return wrong


def nbval(notebook, folder: Path) -> dict[str, str]:
    """Run nbval as `make test` does; the cell's name -> "PASSED" or "FAILED"."""
    (folder / "synthetic.ipynb").write_text(notebooks.to_text(notebook))
    (folder / "pytest.ini").write_text("[pytest]\n")
    here = ["-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider", "-rA", "--color=no", "."]
    run = subprocess.run(
        notebooks.nbval_command(*here),
        cwd=folder,
        env={**os.environ, **notebooks.KERNEL_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED) synthetic\.ipynb::Cell (\d+)", run.stdout, re.MULTILINE)
    assert len(found) == len(SYNTHETIC), run.stdout + run.stderr
    names = list(SYNTHETIC)
    return {names[int(number)]: verdict for verdict, number in found}


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The synthetic notebook, run in a real kernel and made canonical."""
    cells = [v4.new_code_cell(source.strip()) for source, _, _ in SYNTHETIC.values()]
    fresh = notebooks.execute(v4.new_notebook(cells=cells), tmp_path_factory.mktemp("run"))
    return canonical.canonicalise(fresh)


def test_nbval_passes_what_was_built(executed, tmp_path):
    assert nbval(executed, tmp_path) == dict.fromkeys(SYNTHETIC, "PASSED")


def test_nbval_notices_a_wrong_text_and_nothing_else(executed, tmp_path):
    expected = {name: "FAILED" if noticed else "PASSED" for name, (_, _, noticed) in SYNTHETIC.items()}
    assert nbval(spoil(executed), tmp_path) == expected


def test_the_rules_refuse_what_nbval_would_not_notice(executed):
    where = {name: index for index, name in enumerate(SYNTHETIC)}
    assert notebook_rules.uncompared(executed) == [
        f"cell {where['nothing']} has no compared output: end it with a print or an expression."
    ]
    notebook = copy.deepcopy(executed)
    notebook.cells[where["unrun"]].execution_count = None
    plot = notebook.cells[where["picture"]]
    plot.outputs = [output for output in plot.outputs if output.output_type != "stream"]
    problems = notebook_rules.uncompared(notebook)
    assert any(f"cell {where['unrun']} was not run" in problem for problem in problems)
    assert any(f"cell {where['picture']} shows a picture" in problem for problem in problems)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_notebooks_are_canonical_and_compared(path):
    assert notebooks.check(path).problems == []


def test_something_was_checked():
    assert len(COMMITTED) >= 6
