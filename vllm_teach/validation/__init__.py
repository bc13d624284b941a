"""The published figures as data, and what was measured set beside them."""

from typing import TYPE_CHECKING

from vllm_teach import lazy

_HOMES = {
    "Comparison": "comparison",
    "Measured": "comparison",
    "claims": "comparison",
    "compare": "comparison",
    "Row": "tables",
    "Table": "tables",
    "get_table": "tables",
    "load_tables": "tables",
}

__all__ = ["Comparison", "Measured", "Row", "Table", "claims", "compare", "get_table", "load_tables"]

if TYPE_CHECKING:
    from vllm_teach.validation.comparison import Comparison, Measured, claims, compare
    from vllm_teach.validation.tables import Row, Table, get_table, load_tables


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
