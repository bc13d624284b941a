"""Where the package's non-Python folders are: beside the package in a checkout, inside it in a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def checkout_root() -> Path | None:
    """Return the repository's root when the package runs from a checkout or an editable install, else None."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir() else None


def folder(name: str) -> Path:
    """Return the folder `name` ("kernels", "data" or "notebooks") of the checkout, or its copy in the wheel."""
    root = checkout_root()
    return root / name if root else _PACKAGE / name
