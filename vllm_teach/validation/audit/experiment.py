"""An experiment belongs to one row of one table: the checks that make its verdict, and what finds their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.audit.check import Check, Undecidable
from vllm_teach.validation.audit.finding import Finding
from vllm_teach.validation.tables import Row, get_table, load_tables

if TYPE_CHECKING:
    from vllm_teach.validation.audit.lab import Lab

Find = Callable[["Lab"], Iterable[Finding]]

_MODULES = (
    "attention_speed",
    "attention_modes",
    "attention_scenarios",
    "bottleneck",
    "large_model_serving",
    "customer_service",
    "paged_memory",
    "quantization",
    "layer_norm",
    "memory_advice",
    "scheduling_advice",
    "deployment",
    "flash_advice",
    "selection",
    "troubleshooting",
    "monitoring",
)


@dataclass(frozen=True)
class Experiment:
    """What finds out about one row. `about` is what it does, in words; `find` does it and yields the findings."""

    table_id: str
    key: str
    checks: tuple[Check | Undecidable, ...]
    about: str
    find: Find

    @property
    def row(self) -> Row:
        """The claim, as published."""
        return get_table(self.table_id).row(self.key)


class Register:
    """Experiments by (table id, row key), each row at most once."""

    def __init__(self) -> None:
        self._experiments: dict[tuple[str, str], Experiment] = {}

    def experiment(self, table_id: str, key: str, *checks: Check | Undecidable) -> Callable[[Find], Find]:
        """Return the decorator that registers a function, whose docstring says what it does, for one row.

        Raises InvalidArgumentError for a table or a row that does not exist, for a row that has an experiment already,
        for no checks, and for a function without a docstring.
        """
        get_table(table_id).row(key)
        if (table_id, key) in self._experiments:
            raise InvalidArgumentError(f"key={key!r} of table {table_id!r} has an experiment already: remove one.")
        if not checks:
            raise InvalidArgumentError(f"checks of {key!r} in {table_id!r} are none: say what would confirm the claim.")

        def register(find: Find) -> Find:
            about = " ".join((find.__doc__ or "").split())
            if not about:
                raise InvalidArgumentError(f"find of {key!r} has no docstring: say what the experiment does.")
            self._experiments[table_id, key] = Experiment(table_id, key, checks, about, find)
            return find

        return register

    def get(self, table_id: str, key: str) -> Experiment:
        """Return the experiment of a row; raises InvalidArgumentError when there is none."""
        if (table_id, key) not in self._experiments:
            raise InvalidArgumentError(f"key={key!r} of table {table_id!r} has no experiment: write one.")
        return self._experiments[table_id, key]

    def __iter__(self) -> Iterator[Experiment]:
        """Go through the experiments in the order of the tables and their rows."""
        order = [(table.id, key) for table in load_tables().values() for key in table.keys]
        return iter([self._experiments[each] for each in order if each in self._experiments])

    def missing(self) -> list[tuple[str, str]]:
        """Return the rows of all tables that have no experiment."""
        rows = [(table.id, key) for table in load_tables().values() for key in table.keys]
        return [each for each in rows if each not in self._experiments]


REGISTER = Register()
experiment = REGISTER.experiment


def load_experiments() -> Register:
    """Return the register with the experiments of all tables in it. Imports no torch."""
    for name in _MODULES:
        import_module(f"vllm_teach.validation.audit.experiments.{name}")
    return REGISTER
