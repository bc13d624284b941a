"""Reference tables and result files. They live in the repository's `data/`, and in `vllm_teach/data/` in a wheel."""

from pathlib import Path

from vllm_teach import resources


def path(name: str) -> Path:
    """Return the path of the data file or folder `name`; raises FileNotFoundError when there is none."""
    found = resources.folder("data") / name
    if not found.exists():
        raise FileNotFoundError(f"data file {name!r} does not exist: looked for {found}.")
    return found
