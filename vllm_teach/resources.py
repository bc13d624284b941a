"""Where the package's non-Python folders are: beside the package in a checkout, inside it in a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def checkout_root() -> Path | None:
    """Return the repository's root when the package runs from a checkout or an editable install, else None."""
    # Only a wheel has the folders inside the package. What lies beside an installed package is nobody's business here.
    if (_PACKAGE / "notebooks").is_dir():
        return None
    return _PACKAGE.parent


def folder(name: str) -> Path:
    """Return the folder `name` ("kernels", "data" or "notebooks") of the checkout, or its copy in the wheel."""
    root = checkout_root()
    return root / name if root else _PACKAGE / name
