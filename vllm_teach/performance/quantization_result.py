"""The result file of `vllm-teach bench quantization`: what takes minutes is measured once and read by the lesson."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_teach import data
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.quantization_bench import QuantizationBench, QuantizationRow
from vllm_teach.performance.timing import Timing
from vllm_teach.quantization.bootstrap import PerplexityChange

SMOLLM2 = "results/quantization_smollm2.json"
_COMMAND = "vllm-teach bench quantization"


def read_quantization(file: str | Path = SMOLLM2) -> QuantizationBench:
    """Return the bench that `file` holds: a path, or the name of a data file of the package.

    Raises ResourceNotFoundError when the package has no such data file, and InvalidArgumentError for a file that cannot
    be read or holds something else.
    """
    path = file if isinstance(file, Path) else data.path(file)
    try:
        return _bench(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"file={path.name!r} holds no result of `{_COMMAND}` ({error}): write it with that command."
        ) from error


def provenance(bench: QuantizationBench, file: str | Path = SMOLLM2) -> str:
    """Return where the figures of `bench` come from, in three lines: file and command, device, versions."""
    found = bench.environment
    packages = found["packages"]
    torch = packages["torch"] if isinstance(packages, dict) else "unknown"
    samples, length = bench.calibration
    return (
        f"read from {Path(file).name}, written by `{found.get('command', _COMMAND)}`\n"
        f"{bench.model} on {found['device']}, {found['cpu_capability']}, {found['torch_threads']} threads; "
        f"vllm_teach {found['vllm_teach']}, torch {torch}, Python {found['python']}\n"
        f"groups of {bench.group_size}, calibrated on {samples} x {length} tokens, scored on "
        f"{bench.evaluated_tokens:,} others"
    )


def _bench(found: dict[str, Any]) -> QuantizationBench:
    provenance = {key: found[key] for key in ("command", "commit") if key in found}
    fields = {key: value for key, value in found.items() if key not in provenance}
    fields["environment"] = {**found["environment"], **provenance}
    fields["calibration"] = tuple(found["calibration"])
    fields["rows"] = [_row(each) for each in found["rows"]]
    fields["pairs"] = {name: PerplexityChange(**each) for name, each in found["pairs"].items()}
    return QuantizationBench(**fields)


def _row(found: dict[str, Any]) -> QuantizationRow:
    return QuantizationRow(
        **{
            **found,
            "change": PerplexityChange(**found["change"]),
            "decode": _timing(found["decode"]),
            "speedup": _timing(found["speedup"]),
        }
    )


def _timing(found: dict[str, Any]) -> Timing:
    return Timing(**{**found, "samples": tuple(found["samples"])})
