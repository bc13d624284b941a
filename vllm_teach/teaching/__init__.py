"""What the lessons use beside the package itself: exercise checks, widgets, and the start of every notebook.

Names are imported when first used (PEP 562), so `import vllm_teach.teaching` loads neither torch nor matplotlib.
"""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "begin": "lesson",
    "check": "checks",
    "list_checks": "checks",
    "explore": "widgets",
    "figure_png": "widgets",
    "twin": "widgets",
}

__all__ = ["begin", "check", "explore", "figure_png", "list_checks", "twin"]

if TYPE_CHECKING:
    from vllm_teach.teaching.checks import check, list_checks
    from vllm_teach.teaching.lesson import begin
    from vllm_teach.teaching.widgets import explore, figure_png, twin


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
