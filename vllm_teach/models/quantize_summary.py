"""How a quantisation went: sizes, errors, and who can read the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_teach.models.quantized_files import Sizes
from vllm_teach.quantization.layered_model import LinearReport
from vllm_teach.quantization.quantization_config import QuantizationConfig

_LAYOUTS = {"awq": "AutoAWQ's", "gptq": "GPTQ's, version 1", "gptq_v2": "GPTQ's, version 2", "vllm_teach": "its own"}


@dataclass(frozen=True)
class QuantizeSummary:
    """What `quantize_model` did; printing it gives the table of `vllm-teach quantize`.

    `reports` {linear layer: how well it came through}.
    """

    folder: Path
    config: QuantizationConfig
    sizes: Sizes
    reports: dict[str, LinearReport]

    @property
    def error(self) -> float | None:
        """The mean over the linear layers of their output's relative square error; None where none was measured."""
        return mean_errors(self.reports)[0]

    @property
    def rtn_error(self) -> float | None:
        """The same of rounding to nearest."""
        return mean_errors(self.reports)[1]

    def _errors(self) -> str:
        own = f"{self.error:.3%} of the mean square on the calibration text, mean over {len(self.reports)} layers"
        if self.config.method in ("rtn", "int8"):
            return own
        # Not by who gave the weights: AWQ's scales serve all layers of a stage, and one of them may err more by them.
        pairs = [(each.error, each.rtn_error) for each in self.reports.values()]
        better = sum(ours < theirs for ours, theirs in pairs if ours is not None and theirs is not None)
        return f"{own} (rounding to nearest: {self.rtn_error:.3%}; {self.config.method} was better in {better})"

    def __str__(self) -> str:
        config, sizes = self.config, self.sizes
        groups = "a scale a row" if config.group_size is None else f"groups of {config.group_size}"
        head = "int8 embedding and output matrix, " if config.head_bits == 8 else ""
        lines = [
            f"{self.folder}",
            f"  {config.method}, {config.bits} bits, {groups}, {head}layout: {_LAYOUTS[config.layout]}",
            f"  {_change('quantised matrices', sizes.matrices_before, sizes.matrices_after)}",
            f"  {_change('whole model', sizes.model_before, sizes.model_after)}",
        ]
        if self.error is not None:
            lines.append(f"  {'output error':<20}{self._errors()}")
        if config.bits < 4:
            lines.append("  In memory a weight takes 4 bits: the kernels know no fewer.")
        if not config.readable_elsewhere:
            lines.append("  Only vllm_teach reads this layout; other loaders refuse it.")
        return "\n".join(lines)


def mean_errors(reports: Mapping[str, LinearReport]) -> tuple[float | None, float | None]:
    """Return the means of `error` and `rtn_error` over `reports`; None where none was measured."""
    return _mean([each.error for each in reports.values()]), _mean([each.rtn_error for each in reports.values()])


def _change(name: str, before: int, after: int) -> str:
    return f"{name:<20}{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB ({after / before:.3f}x)"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
