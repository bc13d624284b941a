"""A wheel carries the kernels, the tables and the lessons, and works where there is no checkout."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from vllm_teach import kernels

pytestmark = pytest.mark.packaging

USE_THE_WHEEL = """
from pathlib import Path
import vllm_teach
from vllm_teach import data, kernels, resources
from vllm_teach.teaching.lab import list_lessons, prepare_lessons
from vllm_teach.validation.tables import load_tables

assert resources.checkout_root() is None, resources.checkout_root()
assert "site-packages" in vllm_teach.__file__
assert "tl.load" in kernels.source("triton_kernels/online_softmax.py")
assert len(load_tables()) > 10
print(*list_lessons())

mine = prepare_lessons(Path("lessons"))
assert sorted(path.name for path in mine.glob("*.ipynb")) == list_lessons()
(mine / "00_start_here.ipynb").write_text("the reader's work")
prepare_lessons(Path("lessons"))
assert (mine / "00_start_here.ipynb").read_text() == "the reader's work"
"""


@pytest.fixture(scope="module")
def wheel(fresh_tree, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # No isolation: hatchling is part of the dev extra, so building needs no network.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(fresh_tree)]
    subprocess.run(command, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_wheel_maps_every_folder_into_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"vllm_teach"}
    some_of_each = (
        "kernels/triton_kernels/online_softmax.py",
        "kernels/cpu/attention/attend.h",
        "data/reference_tables.yaml",
        "data/tiny-llama/model.safetensors",
        "notebooks/00_start_here.ipynb",
    )
    assert {f"vllm_teach/{name}" for name in some_of_each} <= set(names)


def test_wheel_works_in_a_clean_environment(wheel, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", str(wheel)], check=True, cwd=tmp_path)
    # Bookkeeping, tables and lessons need no torch: the one library they use is enough here.
    subprocess.run([*install, "PyYAML"], check=True, cwd=tmp_path)
    used = subprocess.run([str(python), "-c", USE_THE_WHEEL], cwd=tmp_path, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    assert "00_start_here.ipynb" in used.stdout
    command = [environment / "bin" / "vllm-teach", "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True)
    assert version.stdout.startswith("vllm-teach 0.")


def test_a_wheel_beside_somebody_elses_files_is_no_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "pyproject.toml").touch()  # some packages install theirs by mistake, and a folder of notebooks
    (tmp_path / "notebooks").mkdir()
    code = "from vllm_teach import kernels, resources; print(resources.checkout_root(), len(kernels.list_sources()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"None {len(kernels.list_sources())}"
