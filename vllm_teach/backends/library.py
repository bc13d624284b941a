"""Import a GPU library when it is used, with an error that says what is missing and what to do about it."""

from __future__ import annotations

import importlib
from types import ModuleType

from vllm_teach.errors import MissingDependencyError

# What libraries that were built for another PyTorch have been seen to raise while they are imported.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)


def import_library(module: str, *, package: str, install: str, repair: str) -> ModuleType:
    """Return `module`, as "xformers.ops", of the package that pip calls `package`.

    Raises MissingDependencyError when the package is not installed (the error ends with `install`), lacks a package of
    its own, or does not load (the error ends with `repair`).
    """
    top = module.partition(".")[0]
    try:
        importlib.import_module(top)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise MissingDependencyError(f"{package} is installed, but lacks {error.name}; install it.") from error
        raise MissingDependencyError(f"The package {package} is not installed; {install}.") from error
    except _BROKEN as error:
        raise MissingDependencyError(f"{package} is installed but does not load ({error}); {repair}.") from error
