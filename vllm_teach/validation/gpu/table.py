"""A run of the script as a text that fits a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_teach.validation.gpu.result import Record, Result, SectionResult


def format_result(result: Result) -> str:
    """Return the run as text: the machine, a table for each section, what failed, what was left out."""
    machine = result.machine
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    lines = [
        f"{machine['device']}{memory}, driver {machine['driver']}, CUDA {machine['cuda']}",
        versions,
        f"{result.date}, commit {result.commit or 'unknown'}, {result.seconds:.0f} s of {result.limit_seconds:.0f} s",
    ]
    if result.dry_run:
        lines.append("A dry run in Triton's interpreter: the code was run, and no figure means anything.")
    for section in result.sections:
        lines += ["", *format_section(section)]
    failed = result.failed()
    lines += ["", f"{len(failed)} failed: {'; '.join(failed)}" if failed else "All checks passed."]
    return "\n".join(lines)


def format_section(section: SectionResult) -> list[str]:
    """Return the lines of one section."""
    lines = [f"{section.name}: {section.about} ({section.seconds:.0f} s)"]
    checks = [record for record in section.records if record["kind"] == "check"]
    if checks:
        passed = sum(record["passed"] for record in checks)
        lines.append(f"  {passed} of {len(checks)} checks passed")
        lines += [f"  OFF: {record['name']}: {_error(record)}" for record in checks if not record["passed"]]
    lines += _table(record for record in section.records if record["kind"] != "check")
    lines += [f"  FAILED: {failure['item']}: {failure['error']}" for failure in section.failures]
    if section.not_run:
        lines.append(f"  no time was left for {len(section.not_run)}: {', '.join(section.not_run)}")
    return lines


def _error(record: Record) -> str:
    if "error" in record:
        return f"error {record['error']:.3g}, allowed {record['allowed']:.3g}"
    return ", ".join(f"{key} {value}" for key, value in record.items() if key not in ("kind", "name", "passed"))


def _table(records: Iterable[Record]) -> list[str]:
    rows = [(record["name"], *_cells(record)) for record in records]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines, before = [], ""
    for name, what, figures in rows:
        shown = "" if name == before else name
        lines.append(f"  {shown:<{widths[0]}}  {what:<{widths[1]}}  {figures}".rstrip())
        before = name
    return lines


def _cells(record: Record) -> tuple[str, str]:
    """Return what was measured, and its figures."""
    if record["kind"] == "skipped":
        return str(record["implementation"]), f"skipped: {record['reason'][:80]}"
    if record["kind"] == "tile":
        time = f"{record['median_ms']:.3f} ms" if record["median_ms"] is not None else str(record["does_not_fit"])[:80]
        return str(record["tile"]), time + ("  <- chosen" if record["chosen"] else "")
    figures = [f"{record['median_ms']:9.4f} ms ({record['low_ms']:.4f} to {record['high_ms']:.4f})"]
    if "tflops" in record:
        figures.append(f"{record['tflops']:7.1f} TFLOP/s")
    if "gb_per_s" in record:
        figures.append(f"{record['gb_per_s']:7.0f} GB/s")
    if "modelled_gb_per_s" in record:
        figures.append(f"{record['modelled_gb_per_s']:7.0f} GB/s modelled")
    if "peak_memory_bytes" in record:
        figures.append(f"peak {record['peak_memory_bytes'] / 1e6:.0f} MB")
    return str(record.get("implementation", "")), "  ".join(figures)
