"""A selection as a table: plain text for a terminal, HTML for a notebook."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_teach.backends.spec import AttentionSpec

if TYPE_CHECKING:
    from vllm_teach.backends.selection import Selection

_WIDTH = 110


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and for every other one why not; prints as a table."""

    selection: Selection

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(mark, backend, reason) of each backend, the chosen one first."""
        chosen = self.selection
        return [("->", chosen.choice, chosen.reason), *(("", name, why) for name, why in chosen.others.items())]

    @property
    def _title(self) -> str:
        chosen = self.selection
        return f"{describe_spec(chosen.spec)}; {chosen.machine}; policy {chosen.policy!r}"

    def __str__(self) -> str:
        lines = [*textwrap.wrap(self._title, _WIDTH), ""]
        for mark, name, reason in self.rows:
            lead = f"{mark:<3}{name:<18}"
            lines += textwrap.wrap(reason, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{mark and '&#10132;'}</td><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(reason)}</td></tr>"
            for mark, name, reason in self.rows
        )
        return f"<table><caption>{html.escape(self._title)}</caption><tbody>{cells}</tbody></table>"


def describe_spec(spec: AttentionSpec) -> str:
    """Return a spec in one line: "batch 2, 1 query, 2,048 keys, 8 heads over 2 of 64, bfloat16 on cpu, Causal()"."""
    heads = f"{spec.q_heads} heads" if spec.group == 1 else f"{spec.q_heads} heads over {spec.kv_heads}"
    queries = "1 query" if spec.q_len == 1 else f"{spec.q_len:,} queries"
    parts = [f"batch {spec.batch}", queries, f"{spec.kv_len:,} keys", f"{heads} of {spec.head_dim}"]
    parts.append(f"{str(spec.dtype).removeprefix('torch.')} on {spec.device}")
    if spec.pattern is not None:
        parts.append(repr(spec.pattern))
    if spec.layout != "dense":
        parts.append("varlen" if spec.block_size is None else f"paged in blocks of {spec.block_size}")
    flags = {"softcap": spec.softcap, "ALiBi": spec.alibi, "dropout": spec.dropout, "gradients": spec.requires_grad}
    return ", ".join(parts + [name for name, on in flags.items() if on])
