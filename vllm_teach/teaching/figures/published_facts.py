"""What the reference tables say of how their figures were made: a grid of tables by facts, most of it empty."""

from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vllm_teach.teaching import style
from vllm_teach.validation.tables import Row, Table

_MEASURED = ("metric", "method", "mode", "system")

# Names under which a table's heading or rows would give each fact.
FACTS: Mapping[str, tuple[str, ...]] = {
    "hardware": ("hardware",),
    "model": ("model",),
    "lengths": ("input_len", "output_len", "seq_len"),
    "number of requests": ("num_prompts",),
    "batch": ("batch", "max_num_seqs"),
    "heads": ("heads", "num_heads", "head_dim"),
    "precision": ("dtype", "precision"),
    "versions": ("version", "torch", "vllm"),
    "repetitions": ("repetitions", "samples"),
    "spread": ("spread", "low_high", "std"),
}


def tables_with_numbers(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables that publish what somebody measured: rows of numbers, and not of advice."""
    return tuple(table for table in tables if any(_has_numbers(row) for row in table.rows))


def _has_numbers(row: Row) -> bool:
    return row.kind in _MEASURED and any(isinstance(value, int | float) for value in row.values.values())


def published_facts(tables: Iterable[Table]) -> dict[str, tuple[str, ...]]:
    """Return which of FACTS each table gives. Hardware that the transcription had to infer is not given."""
    return {table.id: tuple(fact for fact in FACTS if _gives(table, fact)) for table in tables}


def _gives(table: Table, fact: str) -> bool:
    if fact == "hardware":
        return bool(table.hardware) and "inferred" not in table.hardware
    fields: dict[str, Any] = dict(table.workload)
    for row in table.rows:
        fields |= row.values
    return any(name in fields for name in FACTS[fact])


def draw_published_facts(given: Mapping[str, tuple[str, ...]], *, title: str) -> Figure:
    """Draw a filled cell where a table gives a fact, and an empty one with a question mark where it does not."""
    facts = list(FACTS)
    figure, ax = plt.subplots(figsize=(8.0, 0.32 * len(given) + 1.9))
    for y, there in enumerate(given.values()):
        for x, fact in enumerate(facts):
            fill = style.colour("measured") if fact in there else "#F1F1F1"
            ax.add_patch(Rectangle((x + 0.05, y + 0.08), 0.9, 0.84, facecolor=fill, edgecolor="none"))
            if fact not in there:
                ax.text(x + 0.5, y + 0.52, "?", ha="center", va="center", size=11, color=style.QUIET_INK)
    ax.set(xlim=(0, len(facts)), ylim=(len(given), 0))
    ax.set_yticks([y + 0.5 for y in range(len(given))], list(given))
    ax.set_xticks([x + 0.5 for x in range(len(facts))], facts, rotation=35, ha="right")
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(title)
    return figure
