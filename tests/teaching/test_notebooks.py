"""The build command runs notebooks in a real kernel, refuses what must not be committed, and writes atomically."""

from pathlib import Path
from types import SimpleNamespace

import nbformat.v4 as v4
import pytest

from vllm_teach.teaching import notebooks
from vllm_teach.teaching.notebooks import NotebookError, build, check, main

SOURCES = ["import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['PYTHONHASHSEED'])", "object()", "2 * 21"]


@pytest.fixture
def save(tmp_path):
    def save(*sources, name="lesson.ipynb", tags=()):
        cells = [v4.new_code_cell(source) for source in sources]
        cells[-1].metadata["tags"] = list(tags)
        path = tmp_path / name
        path.write_text(notebooks.to_text(v4.new_notebook(cells=cells)))
        return path

    return save


def test_build_then_check_and_a_second_build_changes_nothing(save, tmp_path, capsys):
    path = save(*SOURCES)
    assert main(["build", str(path)]) == 0
    first = path.read_text()
    assert '"2 0\\n"' in first
    assert "<object at 0x000000000000>" in first
    assert first.endswith("}\n")
    assert main(["build", "--check", "--execute", str(path)]) == 0
    assert main(["build", str(path)]) == 0
    assert path.read_text() == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["lesson.ipynb"]
    assert "lesson.ipynb: written" in capsys.readouterr().out


def test_the_kernel_works_in_the_notebooks_folder_and_a_run_sees_a_change(save, tmp_path):
    (tmp_path / "number.txt").write_text("1")
    path = save("print(open('number.txt').read())")
    assert build(path).problems == []
    (tmp_path / "number.txt").write_text("2")
    assert check(path).problems == []
    assert check(path, run=True).problems == ["cell 0 printed something else this time:\n    -1\n    +2"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("print(1)\n1 / 0", "ZeroDivisionError"),
        ("import sys\nprint(1, file=sys.stderr)", "stderr"),
        ("print('/home/ada/model')", "absolute path"),
    ],
)
def test_a_refused_notebook_stays_as_it_was(save, source, complaint):
    path = save(source)
    before = path.read_text()
    report = build(path)
    assert not report.written
    assert any(complaint in problem for problem in report.problems)
    assert path.read_text() == before


def test_a_cell_may_raise_when_it_says_so(save):
    path = save("print(1)", "raise ValueError('too long')", tags=["raises-exception"])
    assert build(path).written
    assert "too long" in path.read_text()


def test_a_hanging_cell_and_a_slow_notebook_are_refused(save):
    path = save("import time\ntime.sleep(30)")
    assert "timed out" in build(path, timeout_s=1).problems[0]
    path = save("print(1)")
    assert "0 s are allowed" in build(path, limit_s=0.0).problems[0]


def test_a_broken_rule_is_written_but_reported(save, capsys):
    path = save("print(1)", "x = 1")
    assert main(["build", str(path)]) == 1
    assert '"1\\n"' in path.read_text()
    assert "cell 1 has no compared output" in capsys.readouterr().out


def test_check_notices_a_file_saved_by_jupyterlab(save):
    path = save("print(1)")
    build(path)
    path.write_text(path.read_text().replace('"name": "python3"', '"name": "my-env"'))
    assert "not in canonical form" in check(path).problems[0]


def test_unreadable_files_are_named_and_the_others_still_checked(save, tmp_path, capsys):
    broken = tmp_path / "broken.ipynb"
    broken.write_text("{")
    with pytest.raises(NotebookError, match=r"broken\.ipynb is not a notebook"):
        notebooks.read(broken)
    good = save("print(1)")
    build(good)
    assert main(["build", "--check", str(broken), str(tmp_path / "absent.ipynb"), str(good)]) == 1
    printed = capsys.readouterr().out
    assert "lesson.ipynb: checked, 0.0 s, 0 problems" in printed
    assert "absent.ipynb" in printed


def test_an_obstacle_is_known_by_its_kind_and_not_by_its_words(monkeypatch):
    problems = ["cell 0 speaks of stderr and an absolute path.", notebooks.notebook_rules.Obstacle("cell 1 is bad.")]
    monkeypatch.setattr(notebooks.notebook_rules, "untidy", lambda _: problems)
    assert notebooks.obstacles(None, seconds=1.0) == ["cell 1 is bad."]


def test_lessons_are_compared_in_the_environment_they_were_built_in(save, monkeypatch):
    asked = []

    def run(command, *, env, check):
        asked.append((command, env))
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr(notebooks.subprocess, "run", run)
    path = save("print(1)")
    assert main(["compare", str(path)]) == 5
    assert main(["compare"]) == 5
    (one, env), (every, _) = asked
    assert notebooks.KERNEL_ENVIRONMENT.items() <= env.items()
    assert "--nbval" in one
    assert one[-1] == str(path)
    assert Path(every[-1]) == notebooks.resources.folder("notebooks")


def test_the_hash_seed_is_part_of_that_environment(save, monkeypatch):
    # In which order Python prints a set of texts depends on PYTHONHASHSEED.
    path = save("print({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})")
    build(path)
    assert main(["compare", str(path)]) == 0
    monkeypatch.setitem(notebooks.KERNEL_ENVIRONMENT, "PYTHONHASHSEED", "1")
    assert main(["compare", str(path)]) == 1


def test_make_test_compares_with_this_command():
    makefile = (notebooks.resources.folder("notebooks").parent / "Makefile").read_text()
    assert "-m vllm_teach.teaching.notebooks compare\n" in makefile
    assert "--nbval" not in makefile
    assert "PYTHONHASHSEED" not in makefile


def test_without_a_checkout_compare_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(notebooks.resources, "checkout_root", lambda: None)
    with pytest.raises(SystemExit):
        main(["compare"])
    assert "sanitize.cfg is not here: compare notebooks in a checkout" in capsys.readouterr().err


def test_an_interrupted_write_leaves_the_old_file(save, tmp_path, monkeypatch):
    path = save("print(1)")
    before = path.read_text()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(notebooks.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        notebooks.write_atomically(path, "half")
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_execute_needs_check(save):
    with pytest.raises(SystemExit):
        main(["build", "--execute"])


REST = '"metadata": {}, "nbformat": 4, "nbformat_minor": 5'
CELL = '"cell_type": "code", "id": "a", "outputs": [], "execution_count": 1'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "3",
        "null",
        "[" * 100_000,
        f'{{"cells": null, {REST}}}',
        f'{{"cells": [3], {REST}}}',
        f'{{"cells": [{{{CELL}, "source": ""}}], {REST}}}',
        f'{{"cells": [{{{CELL}, "source": "", "metadata": []}}], {REST}}}',
        f'{{"cells": [{{{CELL}, "source": 5, "metadata": {{}}}}], {REST}}}',
        '{"cells": [], "metadata": [], "nbformat": 4, "nbformat_minor": 5}',
        '{"cells": [], "metadata": {}, "nbformat": "x", "nbformat_minor": 5}',
    ],
)
@pytest.mark.parametrize("mode", [["--check"], []])
def test_a_malformed_notebook_is_named_and_the_others_still_done(save, tmp_path, capsys, text, mode):
    broken = tmp_path / "broken.ipynb"
    broken.write_text(text)
    assert main(["build", *mode, str(broken), str(tmp_path / "absent.ipynb")]) == 1
    printed = capsys.readouterr().out
    assert "broken.ipynb is not a notebook (" in printed
    assert "absent.ipynb: " in printed
    assert len(printed) < 1000
    assert broken.read_text() == text
