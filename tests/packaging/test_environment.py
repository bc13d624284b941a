"""environment.yml and pyproject.toml ask for the same things."""

import tomllib

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
    assert "vllm-teach[lab,serve]" in PROJECT["optional-dependencies"]["dev"]
    optional = {"fastapi", "ray", "xformers", "flash-attn", "ipywidgets", "triton", "jupyterlab"}
    assert not optional & {Requirement(entry).name for entry in PROJECT["dependencies"]}


def test_flash_attn_does_not_make_the_gpu_extra_uninstallable():
    extras = PROJECT["optional-dependencies"]
    assert [Requirement(entry).name for entry in extras["flash"]] == ["flash-attn"]
    assert "flash-attn" not in {Requirement(entry).name for entry in extras["gpu"]}
