"""What the lessons use beside the package itself: exercise checks, widgets, and the start of every notebook.

Names are imported when first used (PEP 562), so `import vllm_teach.teaching` loads neither torch nor matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "begin": "vllm_teach.teaching.lesson",
    "check": "vllm_teach.teaching.checks",
    "list_checks": "vllm_teach.teaching.checks",
    "explore": "vllm_teach.teaching.widgets",
    "figure_png": "vllm_teach.teaching.widgets",
    "twin": "vllm_teach.teaching.widgets",
}

__all__ = ["begin", "check", "explore", "figure_png", "list_checks", "twin"]

if TYPE_CHECKING:
    from vllm_teach.teaching.checks import check, list_checks
    from vllm_teach.teaching.lesson import begin
    from vllm_teach.teaching.widgets import explore, figure_png, twin


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
