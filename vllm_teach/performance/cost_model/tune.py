"""`vllm-teach tune --steps`: measure steps of the engine on this machine, fit the cost model, keep and show the result.

The file lies beside that of the attention backends, one for each dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from vllm_teach.backends.tuning_file import describe_machine, make_folder, save_measurements, tuning_file
from vllm_teach.engine.llm import LLM
from vllm_teach.errors import CacheError, InvalidArgumentError
from vllm_teach.models.resolve import resolve_model
from vllm_teach.performance.cost_model.fit import Fit, fit_steps
from vllm_teach.performance.cost_model.step_cost import ModelledStep
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.training_steps import (
    SCRIPTS,
    TINY_SCRIPTS,
    Script,
    StepMeasurement,
    measure_training_steps,
)
from vllm_teach.performance.cost_model.weight_format import WeightFormat
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.hardware import HardwareSpec
from vllm_teach.performance.machine import measure_this_machine
from vllm_teach.performance.timing import check_calls
from vllm_teach.quantization.quantization_config import read_config

_TINY = "tiny"
_CACHE = 2**30  # bytes of K and V, more than the scripts need for a small model


class StepTuning:
    """Engines of `model` and of the tiny one, whose steps are timed round by round and then fitted together.

    `llms` are there for others to use between rounds. Scripts longer than the model's context are left out, and the
    fit's provenance says which. Raises as `LLM` and `StepMeasurement`, and InvalidArgumentError when no script is left.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        scripts: tuple[Script, ...] = SCRIPTS,
    ) -> None:
        named = {model: scripts} | ({} if model == _TINY else {_TINY: TINY_SCRIPTS})
        self.llms = {name: LLM(name, dtype=dtype, device=device, kv_cache_memory_bytes=_CACHE) for name in named}
        context = self.llms[model].engine.max_model_len
        named[model] = tuple(script for script in scripts if script.longest <= context)
        if not named[model]:
            raise InvalidArgumentError(
                f"model={model!r} has a context of {context} tokens, too short for every script."
            )
        self.left_out = tuple(script.name for script in scripts if script not in named[model])
        self.model, self.num_scripts = model, sum(map(len, named.values()))
        chosen = self.llms[model].model
        self.device, self.dtype = chosen.device.type, str(chosen.dtype).removeprefix("torch.")
        self._measured = [StepMeasurement(llm, name, named[name]) for name, llm in self.llms.items()]
        self._scripts, self._rounds = named, 0

    def warm_up(self) -> None:
        """Run the first script of each model, uncounted."""
        for name, llm in self.llms.items():
            measure_training_steps(llm, name, self._scripts[name][:1], 1)

    def run_round(self, announce: Callable[[str], object] = lambda name: None) -> None:
        """Time every script once; `announce` is told each one's name."""
        for measurement in self._measured:
            measurement.run_round(announce)
        self._rounds += 1

    def fit(self) -> Fit:
        """Measure the machine's ceilings and return what is fitted to the rounds. Raises as `fit_steps`."""
        hardware = HardwareSpec.of(measure_this_machine(device=self.device))
        steps = {
            name: ModelledStep(llm.model.config, hardware, dtype=self.dtype, weights=stored_weights(name))
            for name, llm in self.llms.items()
        }
        points = [point for measurement in self._measured for point in measurement.points()]
        efficiency, residuals = fit_steps(points, steps)
        provenance = {
            "model": self.model,
            "rounds": self._rounds,
            "left_out": list(self.left_out),
            "environment": asdict(describe_environment()),
        }
        return Fit(describe_machine(self.device), hardware, self.dtype, efficiency, residuals, provenance)


def tune_steps(
    model: str = "smollm2",
    *,
    dtype: str = "auto",
    device: str = "auto",
    scripts: tuple[Script, ...] = SCRIPTS,
    rounds: int = 5,
    progress: bool = True,
) -> Fit:
    """Measure steps of `model` and of the tiny one, fit, write the result to this machine's file and return it.

    Takes some minutes on two cores. The file is written at the end and replaces an older one. Raises as `StepTuning`
    and `fit_steps`, and CacheError when the file cannot be written.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    tuning = StepTuning(model, dtype=dtype, device=device, scripts=scripts)
    file = fit_file(tuning.device, tuning.dtype)
    make_folder(file)  # an error now, not in some minutes
    tuning.warm_up()
    with tqdm(total=rounds * tuning.num_scripts, desc="tune steps", disable=not progress) as bar:

        def announce(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        for _ in range(rounds):
            tuning.run_round(announce)
    fit = tuning.fit()
    save_measurements(fit, file)
    return fit


def stored_weights(model: str | Path) -> WeightFormat | None:
    """Return how the weights of a model that is here are quantised; None if they are not."""
    found = read_config(resolve_model(model))
    return None if found is None else WeightFormat(found.method, max(4, found.bits), found.group_size)


def fit_file(device: str, dtype: str) -> Path:
    """Return where the fit of this machine is kept; see `backends.tuning_file.tuning_file`, also for what it raises."""
    file = tuning_file(device)
    return file.with_name(f"{file.stem}-steps-{dtype}.json")


def load_fit(device: str = "cpu", dtype: str = "bfloat16") -> Fit:
    """Return what `tune_steps` found on this machine, with the present number of threads.

    Raises InvalidArgumentError when it found nothing yet, and CacheError when the file cannot be read, is damaged, or
    was recorded on another machine.
    """
    path, machine = fit_file(device, dtype), describe_machine(device)
    words = ", ".join(machine.values())
    command = "vllm-teach tune --steps"
    try:
        fit = Fit.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InvalidArgumentError(
            f"dtype={dtype!r} has no measured steps on this machine ({words}): run {command} --dtype {dtype} first."
        ) from None
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error}): set VLLM_TEACH_HOME to a folder that can.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError(f"{path} is no record of {command}: run it to write the file anew.") from error
    if fit.machine != machine:
        raise CacheError(f"{path} was recorded on another machine than this one ({words}): run {command}.")
    return fit


def format_fit(fit: Fit) -> str:
    """Return what is attained, and every point, measured and modelled, as plain text."""
    attained, hardware = fit.efficiency.attained, fit.hardware
    products, decode, prefill = (attained[k] for k in ("linear layers", "decode attention", "prefill attention"))
    lines = [
        f"{hardware.title}, {fit.dtype}: {hardware.peak_of(fit.dtype) / 1e9:,.0f} GFLOP/s, "
        f"{hardware.memory_bandwidth / 1e9:.1f} GB/s",
        "",
        "attained, fitted",
        f"  {'matrix products, of peak arithmetic':<44}{_share(products.compute)}",
        f"  {'matrix products, of memory bandwidth':<44}{_share(products.bandwidth)}",
        f"  {'arithmetic and memory overlap':<44}{_share(products.overlap)}",
        f"  {'attention over prompts, of peak arithmetic':<44}{_share(prefill.compute)}",
        f"  {'attention while decoding, of bandwidth':<44}{_share(decode.bandwidth)}",
        f"  {'a step, a sequence in it, a call, in us':<44}"
        + "".join(f"{each * 1e6:9.1f}" for each in (fit.efficiency.step, fit.efficiency.sequence, fit.efficiency.call)),
        "",
        f"{'model':<10}{'script':<22}{'step':<40}{'measured ms (lowest to highest)':>34}{'modelled':>10}{'error':>8}",
    ]
    for each in fit.residuals:
        measured = f"{each.seconds * 1e3:.2f} ({each.low * 1e3:.2f} to {each.high * 1e3:.2f})"
        lines.append(
            f"{each.model[-9:]:<10}{each.script:<22}{_step(each.shape):<40}{measured:>34}{each.modelled * 1e3:10.2f}"
            f"{each.error:+8.1%}"
        )
    worst = max(fit.residuals, key=lambda each: abs(each.error))
    lines += [
        "",
        f"median error {fit.median_error:.1%}, largest {abs(worst.error):.1%} ({worst.script}), of the very steps that "
        "it was fitted to",
    ]
    if left_out := fit.provenance.get("left_out"):
        lines.append(f"left out, as the model's context is too short: {', '.join(left_out)}")
    if len({each.model for each in fit.residuals}) == 1:
        lines.append("one model has as many calls in each step: what a call and what a step costs is not told apart")
    return "\n".join(lines)


def _share(value: float) -> str:
    return f"{value:9.1%}" if value != float("inf") else "   no cost"


def _step(shape: StepShape) -> str:
    singles = f"{shape.singles} decode, {shape.keys:,} keys" if shape.singles else ""
    chunks = f"{len(shape.chunks)} prompts, {shape.tokens - shape.singles:,} tokens" if shape.chunks else ""
    return "; ".join(filter(None, (singles, chunks)))
