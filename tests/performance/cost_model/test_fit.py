"""Costs that steps were made of come back from them; the synthetic steps are those that the scripts would measure."""

import json
import math
import random
from dataclasses import replace

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.cost_model.efficiency import Attained, Efficiency
from vllm_teach.performance.cost_model.fit import TERMS, Fit, fit_steps
from vllm_teach.performance.cost_model.links import Link
from vllm_teach.performance.cost_model.operators import OPERATORS
from vllm_teach.performance.cost_model.step_cost import ModelledStep
from vllm_teach.performance.cost_model.step_shape import Item, StepShape
from vllm_teach.performance.cost_model.training_steps import SCRIPTS, TINY_SCRIPTS, Script, TrainingPoint
from vllm_teach.performance.hardware import HardwareSpec
from vllm_teach.performance.model_shapes import get_model_shape
from vllm_teach.performance.timing import Timing

BUDGET = 2048
CORE = HardwareSpec(
    name="core",
    title="two cores",
    peak={"bfloat16": 400e9},
    memory_bytes=2**34,
    memory_bandwidth=30e9,
    l2_bytes=2**25,
    shared_memory_bytes=0,
    num_sms=2,
    link=Link("memory", 1e10, 1e-5),
    host_link=Link("memory", 1e10, 0.0),
    kernel_launch=0.0,
    source="made up",
)
MODELS = {name: ModelledStep(get_model_shape(name), CORE) for name in ("smollm2-135m", "tiny")}


def truth(overlap: float = 1.0, decode: float = 0.4, step: float = 3e-4) -> Efficiency:
    products = Attained(0.55, 0.8, overlap)
    attained = dict.fromkeys(OPERATORS, Attained(math.inf, 1.0)) | {
        "linear layers": products,
        "logits": products,
        "decode attention": Attained(math.inf, decode),
        "prefill attention": Attained(0.3, math.inf),
    }
    return Efficiency(attained, call=9e-6, step=step, sequence=4e-5, link=1.0, source="truth")


def shapes_of(script: Script) -> list[StepShape]:
    """The steps of a script by its own arithmetic: prompts in order, as many tokens a step as the budget has left."""
    shapes, waiting, context = [], [], []
    for number in range(max(wave.step for wave in script.waves) + 40):
        for wave in script.waves:
            waiting += [[0, wave.length]] * wave.num_prompts if wave.step == number else []
        items = [Item(length, 1) for length in context]
        room = BUDGET - len(items)
        context = [length + 1 for length in context]
        while waiting and room:
            start, length = waiting.pop(0)
            count = min(room, length - start)
            room -= count
            items.append(Item(start, count, start + count == length))
            if start + count < length:
                waiting.insert(0, [start + count, length])
            else:
                context.append(length)
        shapes.append(StepShape.of(items))
        if not waiting and number >= max(wave.step for wave in script.waves) and shapes[-1].chunks == ():
            return shapes
    raise AssertionError(script)


def points(efficiency: Efficiency, noise: float = 0.0) -> list[TrainingPoint]:
    source, made = random.Random(0), []
    for model, scripts in (("smollm2-135m", SCRIPTS), ("tiny", TINY_SCRIPTS)):
        step = MODELS[model].with_efficiency(efficiency)
        for script in scripts:
            for shape in shapes_of(script):
                seconds = sum(step.parts_of(shape, 16).values()) * source.lognormvariate(0, noise)
                made.append(TrainingPoint(model, script.name, shape, Timing(seconds, seconds, seconds, (seconds,))))
    return made


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_what_the_steps_were_made_of_comes_back(overlap: float) -> None:
    expected = truth(overlap)
    found, residuals = fit_steps(points(expected), MODELS)
    assert max(abs(each.error) for each in residuals) < 0.01
    assert found.attained["linear layers"].overlap == overlap
    for kind in ("linear layers", "decode attention", "prefill attention"):
        for share in ("compute", "bandwidth"):
            assert getattr(found.attained[kind], share) == pytest.approx(
                getattr(expected.attained[kind], share), rel=0.05
            ), (kind, share)
    for cost in ("call", "step", "sequence"):
        assert getattr(found, cost) == pytest.approx(getattr(expected, cost), rel=0.1, abs=2e-5), cost


def test_steps_that_were_not_measured_are_told_within_the_noise() -> None:
    expected = truth(0.7)  # between two points of the grid
    found, residuals = fit_steps(points(expected, noise=0.05), MODELS)
    assert 0.01 < sum(abs(each.error) for each in residuals) / len(residuals) < 0.08
    unseen = [
        StepShape.of([Item(200 + i, 1) for i in range(40)]),
        StepShape.of([Item(700, 1), Item(90, 1), Item(300, 1)]),
        StepShape.of([Item(0, 333)]),
        StepShape.of([Item(1024, 512, False), *[Item(150, 1)] * 20]),
    ]
    for shape in unseen:
        told, true = (
            sum(MODELS["smollm2-135m"].with_efficiency(each).parts_of(shape, 16).values()) for each in (found, expected)
        )
        assert told == pytest.approx(true, rel=0.08)


def test_what_costs_nothing_has_an_infinite_share() -> None:
    found, residuals = fit_steps(points(truth(decode=math.inf, step=0.0)), MODELS)
    assert found.attained["decode attention"].bandwidth > 50
    assert found.step < 1e-5
    assert max(abs(each.error) for each in residuals) < 0.01


def test_no_cost_is_ever_negative() -> None:
    """Steps that get faster the more they do: the fit says so in its residuals, and not by a gain."""
    made = points(truth())
    turned = [
        replace(point, seconds=Timing(*[1e-4 / point.seconds.median] * 3, ()))
        for point in made  # type: ignore[arg-type]
    ]
    found, residuals = fit_steps(turned, MODELS)
    assert min(found.call, found.step, found.sequence) >= 0
    assert all(share.compute > 0 and share.bandwidth > 0 for share in found.attained.values())
    assert max(abs(each.error) for each in residuals) > 0.5


def test_too_few_points_are_refused() -> None:
    few = points(truth())[: 2 * len(TERMS) - 1]
    with pytest.raises(InvalidArgumentError, match="points has 13 steps for 7 terms: measure at least 14"):
        fit_steps(few, MODELS)


def test_residuals_keep_what_was_measured_in_order_and_json_brings_back_the_same() -> None:
    made = points(truth(), noise=0.02)
    efficiency, residuals = fit_steps(made, MODELS)
    assert [(each.model, each.script, each.shape) for each in residuals] == [
        (each.model, each.script, each.shape) for each in made
    ]
    assert [each.seconds for each in residuals] == [each.seconds.median for each in made]
    assert residuals[0].error == residuals[0].modelled / residuals[0].seconds - 1
    fit = Fit({"processor": "made up"}, CORE, "bfloat16", efficiency, residuals, {"rounds": 1})
    assert Fit.from_json(json.loads(json.dumps(fit.to_json(), allow_nan=False))) == fit
    step = fit.step_cost(get_model_shape("smollm2-135m"))
    assert sum(step.parts_of(residuals[0].shape, 16).values()) == pytest.approx(residuals[0].modelled)
