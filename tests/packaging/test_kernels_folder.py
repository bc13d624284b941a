"""The top-level folder `kernels/` never passes for the public package of that name."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_teach import data, kernels, resources
from vllm_teach.errors import ResourceNotFoundError

ASK_TRANSFORMERS = "from transformers.utils import is_kernels_available as f; print(f())"


def run_python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_kernels_is_no_regular_package():
    assert not (resources.checkout_root() / "kernels" / "__init__.py").exists()
    assert not (resources.checkout_root() / "kernels" / "triton").exists()


def test_transformers_answers_as_without_the_project(tmp_path):
    forget_checkout = f"import sys; sys.path.remove({str(resources.checkout_root())!r}); "
    without = run_python(forget_checkout + ASK_TRANSFORMERS, tmp_path)
    assert run_python(ASK_TRANSFORMERS, resources.checkout_root()) == without


def test_an_installed_kernels_package_wins(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.real)"
    assert run_python(code, resources.checkout_root()) == "True"


def test_kernel_sources_are_found_and_importable_from_the_checkout(tmp_path):
    names = kernels.list_sources()
    assert "triton_kernels/online_softmax.py" in names
    assert "def " in kernels.source("triton_kernels/online_softmax.py")
    code = "import vllm_teach.kernels.triton_kernels as package; print(package.__name__)"
    assert run_python(code, tmp_path) == "vllm_teach.kernels.triton_kernels"


@pytest.mark.parametrize("find", [kernels.source, data.path])
def test_a_name_that_is_not_there_is_a_typed_error(find):
    with pytest.raises(ResourceNotFoundError, match=r"name='nothing\.py' is no"):
        find("nothing.py")
