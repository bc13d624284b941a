"""Reference tables and result files. They live in the repository's `data/`, and in `vllm_teach/data/` in a wheel."""

from pathlib import Path

from vllm_teach import resources
from vllm_teach.errors import ResourceNotFoundError


def path(name: str) -> Path:
    """Return the path of the data file or folder `name`; raises ResourceNotFoundError when there is none."""
    found = resources.folder("data") / name
    if not found.exists():
        raise ResourceNotFoundError(f"name={name!r} is no data file of the package: look in {found.parent}.")
    return found
