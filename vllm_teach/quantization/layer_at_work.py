"""One layer while its stages are quantised one after another: by rounding to nearest, by GPTQ or by AWQ.

The linear layers of a stage are quantised as one matrix, row below row: they share their inputs, and no row has to do
with another. Which of several results to keep is decided for each linear layer, by its error on the calibration inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.quantization.awq import quantize_clipped, search_clip, search_scales
from vllm_teach.quantization.folding import fold_scales
from vllm_teach.quantization.gptq import check_damping, invert_hessian, quantize_gptq
from vllm_teach.quantization.hessian import Hessian, mean_square
from vllm_teach.quantization.layered_model import LayerResult, LinearReport, Stage, WorkingLayer, read_weight
from vllm_teach.quantization.quantized_weight import QuantizedWeight
from vllm_teach.quantization.rounding import check_bits, check_min_zero, quantize_rtn

METHODS = ("rtn", "gptq", "awq")
# Every token attends to the first one of its text, and often to it most (the attention sink: Xiao et al. 2023, arXiv
# 2309.17453). Its inputs are like no other's, so as one token of hundreds it is what GPTQ gives up for the others: its
# keys may then err by more than they are. So for GPTQ the first tokens count as a sixteenth of all tokens on top.
_FIRST_TOKENS = 1 / 16


class _Grid(TypedDict):
    group_size: int | None
    symmetric: bool


@dataclass(frozen=True)
class Settings:
    """How every linear layer is quantised; see `calibration.quantize_layers`.

    Raises InvalidArgumentError for an unknown method, number of bits or min_zero, a negative damping, and for an
    act_order or min_zero that the method does not have.
    """

    method: str
    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool
    damping: float
    min_zero: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidArgumentError(
                f"method={self.method!r} is not valid: use one of {', '.join(map(repr, METHODS))}."
            )
        check_bits(self.bits)
        check_damping(self.damping)
        if self.act_order and self.method != "gptq":
            raise InvalidArgumentError(f"act_order=True has no meaning for method={self.method!r}: leave it out.")
        check_min_zero(self.min_zero)
        if self.min_zero and self.method == "awq":
            raise InvalidArgumentError(f"min_zero={self.min_zero!r} is not for method='awq': its formats need none.")

    @property
    def grid(self) -> _Grid:
        """What grids the weights are rounded to, as arguments."""
        return {"group_size": self.group_size, "symmetric": self.symmetric}


class _Candidate(NamedTuple):
    """Quantised rows of a stage, for inputs that are divided by `scales` `[in]` (None: that are not)."""

    report: LinearReport  # its errors are not known yet
    weight: QuantizedWeight
    scales: Tensor | None = None

    def rows(self, rows: slice) -> _Candidate:
        whole = self.weight
        part = QuantizedWeight(whole.codes[rows], whole.scales[rows], whole.zeros[rows], whole.bits, whole.group_of)
        return self._replace(weight=part)

    def error(self, original: Tensor, hessian: Tensor) -> float:
        """Return E|Ŵx - Wx|² for the rows `original`."""
        there = self.weight.dequantize() if self.scales is None else self.weight.dequantize() / self.scales
        return mean_square(there - original, hessian)


class LayerAtWork:
    """Quantises `layer`; each of `walks` is `layer.walk` of some of the samples, none of them begun yet.

    Without walks there are no inputs to look at, and the method must be "rtn".
    """

    def __init__(self, layer: WorkingLayer, walks: list[Iterator[Tensor]], settings: Settings) -> None:
        self._layer, self._walks, self._settings = layer, walks, settings
        self._weights: dict[str, QuantizedWeight] = {}
        self._tensors: dict[str, Tensor] = {}
        self._reports: dict[str, LinearReport] = {}

    def quantize(self, index: int) -> LayerResult:
        """Return the result, as that of layer `index`. The walks then have the last stage's products left to do."""
        for stage in self._layer.stages:
            parts = [read_weight(self._layer, name) for name in stage.linears]
            weight = torch.cat(parts)  # [out of all, in]
            rtn = _Candidate(LinearReport("rtn"), self._rtn(weight))
            inputs, first = Hessian(weight.shape[1]), []
            for walk in self._walks:
                given = next(walk)  # [samples, len, in]
                inputs.add(given)
                first.append(given[:, 0].clone())  # a view would keep all of it
                del given
            if self._settings.method == "gptq":
                candidates = [self._gptq(weight, inputs, torch.cat(first)), rtn]
            else:
                candidates = self._awq(stage, weight, inputs) if self._settings.method == "awq" else [rtn]
            end = 0
            for name, part in zip(stage.linears, parts, strict=True):
                rows = slice(end, end := end + len(part))
                self._keep_best(name, part, [each.rows(rows) for each in candidates], rtn.rows(rows), inputs)
        return LayerResult(index, self._weights, self._tensors, self._reports)

    def _keep_best(
        self, name: str, weight: Tensor, candidates: list[_Candidate], rtn: _Candidate, inputs: Hessian
    ) -> None:
        best, report = candidates[0], candidates[0].report
        if inputs.tokens:
            hessian = inputs.matrix.float()
            errors = [each.error(weight, hessian) for each in candidates]
            best = candidates[errors.index(min(errors))]
            # Where nothing comes out, there is nothing to err in.
            power = mean_square(weight, hessian) or 1.0
            report = replace(best.report, error=min(errors) / power, rtn_error=rtn.error(weight, hessian) / power)
        self._weights[name], self._reports[name] = best.weight, report
        self._layer.replace(f"{name}.weight", best.weight.dequantize())

    def _gptq(self, weight: Tensor, inputs: Hessian, first: Tensor) -> _Candidate:
        settings, rows = self._settings, first.double()  # [samples, in]
        hessian = inputs.matrix.addmm_(rows.T, rows, alpha=2 * _FIRST_TOKENS / len(rows))
        factor = invert_hessian(hessian, settings.damping, act_order=settings.act_order)
        mended = quantize_gptq(weight, factor, settings.bits, min_zero=settings.min_zero, **settings.grid)
        return _Candidate(LinearReport("gptq", damping=factor.damping), mended)

    def _awq(self, stage: Stage, weight: Tensor, inputs: Hessian) -> list[_Candidate]:
        """Return two candidates, with clipped groups and with whole ones: clipping does not look across groups."""
        bits, grid = self._settings.bits, self._settings.grid
        hessian = inputs.matrix.float()
        search = search_scales(weight, hessian, inputs.magnitudes, bits, source=stage.source, **grid)
        scales = None
        if search.alpha > 0:
            scales = fold_scales(self._layer, stage, search.scales, self._weights, self._tensors)
            weight, hessian = weight * scales, hessian / scales / scales[:, None]
        limit = search_clip(weight, hessian, bits, **grid)
        clipped = quantize_clipped(weight, limit, bits, symmetric=self._settings.symmetric)
        report = LinearReport("awq", alpha=search.alpha)
        return [_Candidate(report, each, scales) for each in (clipped, self._rtn(weight))]

    def _rtn(self, weight: Tensor) -> QuantizedWeight:
        return quantize_rtn(weight, self._settings.bits, min_zero=self._settings.min_zero, **self._settings.grid)
