"""Every typed error of the package ends in a full stop: its message is one sentence that a reader meets on its own."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import vllm_teach
from vllm_teach import errors
from vllm_teach.teaching.notebooks import all_notebooks, read

PACKAGE = Path(vllm_teach.__file__).parent


def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def typed_errors(files: dict[str, ast.Module]) -> set[str]:
    """The names in errors.py, and of what other files derive from them or from Exception."""
    names = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    for tree in files.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and {getattr(base, "id", "") for base in node.bases} & (
                names | {"Exception"}
            ):
                names.add(node.name)
    return names


def unfinished(files: dict[str, ast.Module]) -> tuple[list[str], int]:
    """(where a literal message lacks its full stop, how many literal messages there are)."""
    found, count, names = [], 0, typed_errors(files)
    for file, tree in files.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
                continue
            message = node.args[0] if node.args else None
            if isinstance(message, ast.JoinedStr):
                message = message.values[-1]
                literal = True
            else:
                literal = isinstance(message, ast.Constant) and isinstance(message.value, str)
            if literal:
                count += 1
                if not (isinstance(message, ast.Constant) and str(message.value).endswith(".")):
                    found.append(f"{file}:{node.lineno}")
    return found, count


def test_every_message_ends_in_a_full_stop() -> None:
    found, count = unfinished(trees())
    assert found == []
    assert count > 100, "the search finds the package's messages"


@pytest.mark.parametrize(
    "message", ['"n is bad: use 1"', 'f"n={n} is bad: use {m}"', '("n is bad: " "use 1")', '("n is bad." f" Use {n}")']
)
def test_a_message_without_one_is_found(message: str) -> None:
    files = {
        "mine.py": ast.parse("class MineError(VllmTeachError): ..."),
        "a.py": ast.parse(f"raise MineError({message})\nraise InvalidArgumentError('n is bad: use 1.')"),
    }
    assert unfinished(files) == (["a.py:1"], 2)


def test_nobody_is_told_to_get_the_package_from_a_registry() -> None:
    """It is in none: `pip install 'vllm-teach[...]'` would look for it there. Outputs are the code's of another day."""
    root, lessons = PACKAGE.parent, all_notebooks()
    texts = {path: "\n".join(cell.source for cell in read(path).cells) for path in lessons}
    for path in (root / "README.md", *PACKAGE.rglob("*.py"), *(root / "kernels").rglob("*.py")):
        texts[path] = path.read_text(encoding="utf-8")
    assert [path for path, text in texts.items() if re.search(r"pip install \W*vllm", text)] == []
    assert sum("pip install" in text for text in texts.values()) > 2, "the search finds what is said to be installed"
    assert lessons


def test_what_is_said_to_be_installed_is_an_extra_of_a_clone() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named: set[str] = set()
    for folder in (PACKAGE, PACKAGE.parent / "kernels"):
        for path in folder.rglob("*.py"):
            named |= set(re.findall(r"""installs\(["'](\w+)["']\)""", path.read_text(encoding="utf-8")))
    assert named == {"dev", "flash", "gpu", "lab", "ray", "serve"} <= project["optional-dependencies"].keys()
    assert errors.installs("serve") == 'pip install -e ".[serve]" in the clone'
