"""`vllm-teach bench quantization`: what fewer bits a weight cost and gain: perplexity, bytes, and speed of decoding.

Every variant is a folder that `vllm-teach quantize` could have written, loaded as anyone would load it. Perplexities
are of one text that no calibration has read, and compared token by token with bfloat16's (`perplexity_change`); speeds
come from one race, as ratios to bfloat16 in the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from tqdm import tqdm

from vllm_teach.engine.field_checks import check_whole
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_config, load_model
from vllm_teach.models.quantize import quantize_model, read_reports
from vllm_teach.models.quantize_summary import mean_errors
from vllm_teach.models.resolve import resolve_model
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.quantization_plan import BASELINE, VARIANTS, Variant, check_plan
from vllm_teach.performance.side_by_side import Race, race
from vllm_teach.performance.timing import Timing, check_calls
from vllm_teach.quantization.bootstrap import PerplexityChange, perplexity_change
from vllm_teach.quantization.linear import QuantizedMatrix
from vllm_teach.quantization.sliding_window import check_ids, perplexity

_PROMPT = 16  # tokens of the scored text, from which each model goes on
_KV_BLOCKS, _BLOCK_SIZE = 64, 16


@dataclass(frozen=True)
class QuantizationRow:
    """One variant. Bytes are those of the loaded weights; `linear_bytes` leaves out embedding, head and norms.

    `change` is the perplexity against bfloat16's; `decode` are seconds a token of one sequence, its prompt's share
    included, `speedup` bfloat16's seconds over them in the same round. `error` and `rtn_error` are the mean relative
    errors of the layers' outputs on the calibration text, of this method and of rounding to nearest; None where nothing
    is quantised.
    """

    name: str
    perplexity: float
    change: PerplexityChange
    linear_bytes: int
    model_bytes: int
    decode: Timing
    speedup: Timing
    error: float | None
    rtn_error: float | None


@dataclass(frozen=True)
class QuantizationBench:
    """The whole result; `pairs` {"one / other": the perplexity of one variant over that of another}."""

    model: str
    group_size: int | None
    calibration: tuple[int, ...]
    evaluated_tokens: int
    window: int
    decoded_tokens: int
    rounds: int
    rows: list[QuantizationRow]
    pairs: dict[str, PerplexityChange]
    environment: dict[str, object]

    def row(self, name: str) -> QuantizationRow:
        """Return the row of a variant; InvalidArgumentError when it was not measured."""
        found = {row.name: row for row in self.rows}
        if name not in found:
            raise InvalidArgumentError(f"name={name!r} was not measured: use one of {', '.join(map(repr, found))}.")
        return found[name]

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self)


@dataclass(frozen=True)
class _Measured:
    """What a variant shows when it runs alone."""

    nlls: Tensor
    linear_bytes: int
    model_bytes: int
    error: float | None
    rtn_error: float | None


def bench_quantization(
    model: str | Path,
    evaluation_ids: Tensor,
    calibration_ids: Tensor,
    folder: Path,
    *,
    variants: tuple[Variant, ...] = VARIANTS,
    window: int | None = None,
    rounds: int = 5,
    decode_tokens: int = 64,
    progress: bool = True,
) -> QuantizationBench:
    """Quantise, score and time `model` in all `variants`; the quantised models are written below `folder`, and stay.

    A quantised model that the same call left there is used again. `evaluation_ids`, int64 `[tokens]`, is the text to
    score, read through windows of `window` tokens (1,024 by default, or the model's context if that is shorter) in
    steps of three quarters; `calibration_ids`, int64 `[samples, len]`, is what the methods learn from. Runs on the CPU.

    Raises InvalidArgumentError, before anything is quantised, as `check_plan` does and for `rounds` and `decode_tokens`
    that cannot be; when `folder` holds another model under a variant's name, of another source or calibration too; and
    what quantising, scoring and loading raise.
    """
    source = resolve_model(model)
    evaluation_ids = check_ids(evaluation_ids)
    window = check_plan(source, folder, tokens=len(evaluation_ids), variants=variants, window=window)
    check_calls("rounds", rounds, 1, "measures nothing")
    most = min(load_config(source).max_position, _KV_BLOCKS * _BLOCK_SIZE) - _PROMPT
    check_whole("decode_tokens", decode_tokens, 1, most, hint=f"use a whole number from 1 to {most}")
    measured: dict[str, _Measured] = {}
    runners: dict[str, Callable[[], object]] = {}
    with tqdm(total=2 * len(variants) + 1, desc="bench quantization", disable=not progress) as bar:
        made = {}
        for variant in variants:
            bar.set_postfix_str(f"making {variant.name}")
            made[variant.name] = _make(source, variant, folder, calibration_ids, progress)
            bar.update()
        for variant in variants:
            bar.set_postfix_str(f"scoring {variant.name}")
            path, errors = made[variant.name]
            decoder = load_model(path, variant.dtype)
            linear_bytes = _linear_bytes(decoder)
            hidden, head = decoder_parts(decoder)
            scored = perplexity(hidden, evaluation_ids, window=window, stride=window * 3 // 4, head=head)
            measured[variant.name] = _Measured(scored.nlls, linear_bytes, decoder.num_bytes(), *errors)
            prompt = evaluation_ids[:_PROMPT].tolist()
            runners[variant.name] = partial(_decode, _load(path, variant), prompt, decode_tokens)
            bar.update()
        bar.set_postfix_str("decoding")
        result = race(runners, BASELINE, rounds=rounds)
        bar.update()
    configs = [variant.config for variant in variants if variant.config is not None]
    return QuantizationBench(
        str(model),
        next((config.group_size for config in configs if config.group_size is not None), None),
        tuple(calibration_ids.shape),
        len(evaluation_ids) - 1,
        window,
        decode_tokens,
        rounds,
        _rows(measured, result, decode_tokens),
        _pairs({name: each.nlls for name, each in measured.items()}),
        asdict(describe_environment()),
    )


def _rows(measured: dict[str, _Measured], result: Race, decode_tokens: int) -> list[QuantizationRow]:
    base = measured[BASELINE].nlls
    return [
        QuantizationRow(
            name,
            float(each.nlls.mean().exp()),
            perplexity_change(each.nlls, base),
            each.linear_bytes,
            each.model_bytes,
            Timing.of([seconds / decode_tokens for seconds in result.seconds[name].samples]),
            Timing.of([1 / ratio for ratio in result.ratios[name].samples]),
            each.error,
            each.rtn_error,
        )
        for name, each in measured.items()
    ]


def _make(
    source: Path, variant: Variant, folder: Path, calibration_ids: Tensor, progress: bool
) -> tuple[Path, tuple[float | None, float | None]]:
    """Return the folder of a variant, quantised if it is not there yet, and the mean errors of its layers."""
    if variant.config is None:
        return source, (None, None)
    path = folder / variant.name.replace(", ", "-").replace(" ", "-")
    if not path.exists():
        quantize_model(source, path, variant.config, calibration_ids, progress=progress)
    return path, mean_errors(read_reports(source, path, variant.config, calibration_ids))


def _linear_bytes(decoder: Decoder) -> int:
    """Return what the matrices of the decoder layers' linear layers take; joined ones share theirs."""
    modules = list(decoder.model.layers.modules())
    packed = {id(each.packed): each.packed.num_bytes for each in modules if isinstance(each, QuantizedMatrix)}
    return sum(packed.values()) + sum(each.weight.nbytes for each in modules if isinstance(each, nn.Linear))


def _load(path: Path, variant: Variant) -> LLM:
    name = str(variant.dtype).removeprefix("torch.")
    return LLM(
        path,
        dtype=name,
        device="cpu",
        max_num_seqs=1,
        enable_prefix_caching=False,
        num_kv_blocks=_KV_BLOCKS,
        block_size=_BLOCK_SIZE,
    )


def _decode(llm: LLM, prompt: list[int], count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.generate([prompt], params, use_tqdm=False)


def _pairs(nlls: dict[str, Tensor]) -> dict[str, PerplexityChange]:
    """Compare each calibrated method with rounding to nearest in the same bits."""
    pairs = [(f"{method}{bits}", f"rtn{bits}") for bits in (4, 3) for method in ("gptq", "awq")]
    return {
        f"{one} / {other}": perplexity_change(nlls[one], nlls[other])
        for one, other in pairs
        if one in nlls and other in nlls
    }


def format_quantization(bench: QuantizationBench) -> str:
    """Return the result as a table of plain text."""
    base = bench.row(BASELINE)
    threads = bench.environment.get("torch_threads")
    lines = [
        f"{bench.model}, cpu, {threads} threads; groups of {bench.group_size}, calibrated "
        f"on {' x '.join(map(str, bench.calibration))} tokens, scored on {bench.evaluated_tokens:,} others",
        f"bytes of the linear layers and of the whole model against bf16's; ms a token, and the ratio within a round: "
        f"medians of {bench.rounds} (lowest to highest)",
        "",
        f"  {'weights':<17}{'perplexity':>11}{'against bf16 (95 % interval)':>39}{'linear':>9}{'model':>9}"
        f"{'ms/token':>10}   times bf16's speed",
    ]
    for row in bench.rows:
        change = row.change
        lines.append(
            f"  {row.name:<17}{row.perplexity:>11.3f}{_percent(change.ratio):>13}"
            f"{f'({_percent(change.low)} to {_percent(change.high)})':>26}"
            f"{row.linear_bytes / base.linear_bytes:>8.3f}x{row.model_bytes / base.model_bytes:>8.3f}x"
            f"{row.decode.median * 1e3:>10.2f}   {row.speedup.median:.2f} ({row.speedup.low:.2f} to "
            f"{row.speedup.high:.2f})"
        )
    lines += ["", "calibrated against rounding to nearest, in the same bits"]
    lines += [f"  {name:<17}{change}" for name, change in bench.pairs.items()]
    return "\n".join(lines)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"
