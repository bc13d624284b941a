"""environment.yml and pyproject.toml ask for the same things."""

import ast
import json
import sys
import tomllib
from importlib.metadata import packages_distributions

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_teach import resources

ROOT = resources.checkout_root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def conda_requirements() -> dict[str, SpecifierSet]:
    entries = [Requirement(entry) for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    return {entry.name: entry.specifier for entry in entries}


def test_conda_environment_takes_the_dev_extra_from_conda_forge_alone():
    assert ENVIRONMENT["channels"] == ["conda-forge"]
    assert [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)] == [["-e .[dev]"]]
    assert "pip" in conda_requirements()


def test_conda_and_pyproject_allow_the_same_python():
    assert conda_requirements()["python"] == SpecifierSet(PROJECT["requires-python"])


def test_conda_names_no_requirement_that_pyproject_does_not_have():
    declared = {Requirement(entry).name for entry in PROJECT["dependencies"]}
    assert set(conda_requirements()) - {"python", "pip"} <= declared


def test_dev_extra_contains_the_lab_extra_and_core_stays_small():
    assert "vllm-teach[lab]" in PROJECT["optional-dependencies"]["dev"]
    optional = {"fastapi", "ray", "xformers", "flash-attn", "ipywidgets", "triton", "jupyterlab"}
    assert not optional & {Requirement(entry).name for entry in PROJECT["dependencies"]}


def imports_of_lessons() -> set[str]:
    """The modules that code cells of the lessons and their solutions import."""
    found = set()
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
            for node in ast.walk(ast.parse(source, feature_version=(3, 11))):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module)
    return found


def test_the_lab_extra_has_what_lessons_import():
    lab = {Requirement(entry).name for entry in PROJECT["optional-dependencies"]["lab"]}
    declared = lab | {Requirement(entry).name for entry in PROJECT["dependencies"]}
    modules = imports_of_lessons()
    foreign = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"vllm_teach"}
    owners = packages_distributions()
    assert {name for name in foreign if not declared & {owner.lower() for owner in owners[name]}} == set()
    if any(name.startswith("vllm_teach.serving") for name in modules):
        assert "vllm-teach[serve]" in PROJECT["optional-dependencies"]["lab"]


def test_flash_attn_does_not_make_the_gpu_extra_uninstallable():
    extras = PROJECT["optional-dependencies"]
    assert [Requirement(entry).name for entry in extras["flash"]] == ["flash-attn"]
    assert "flash-attn" not in {Requirement(entry).name for entry in extras["gpu"]}
