"""Kernel sources. The files live in the repository's `kernels/` folder, and in `vllm_teach/kernels/` in a wheel.

The top-level folder has no `__init__.py` on purpose: as a regular package it would shadow the public package
`kernels`, which transformers imports when it finds it.
"""

from pathlib import Path

from vllm_teach import resources
from vllm_teach.errors import ResourceNotFoundError

# In a checkout this makes `vllm_teach.kernels.triton_kernels` importable from the repository's folder.
__path__ = [str(Path(__file__).parent), *([str(resources.folder("kernels"))] if resources.checkout_root() else [])]


def source(name: str) -> str:
    """Return the text of the kernel source `name`, a path such as `"triton_kernels/online_softmax.py"`.

    Raises ResourceNotFoundError when there is no such file.
    """
    file = resources.folder("kernels") / name
    if not file.is_file():
        raise ResourceNotFoundError(f"name={name!r} is no kernel source: choose one of {', '.join(list_sources())}.")
    return file.read_text(encoding="utf-8")


def list_sources() -> list[str]:
    """Return the names of all kernel sources, sorted."""
    root = resources.folder("kernels")
    kinds = {".py", ".cu", ".cuh", ".cpp", ".h"}
    # Only in its subfolders: in a wheel the modules that build the kernels lie in the folder itself.
    found = (path.relative_to(root) for path in root.glob("*/**/*") if path.suffix in kinds)
    return sorted(path.as_posix() for path in found if path.name != "__init__.py" and "__pycache__" not in path.parts)
