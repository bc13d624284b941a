"""What is measured is what the scripts say; the clock is the test's."""

import pytest
import torch

from vllm_teach.engine.llm import LLM
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance.cost_model import training_steps
from vllm_teach.performance.cost_model.step_shape import StepShape
from vllm_teach.performance.cost_model.training_steps import (
    SCRIPTS,
    TINY_SCRIPTS,
    Script,
    Wave,
    measure_training_steps,
)
from vllm_teach.performance.model_shapes import get_model_shape


class Letters:
    """A tokenizer with a letter for each token."""

    stop_token_ids = (0,)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = Decoder(ModelConfig("LlamaForCausalLM", 90, 16, 24, 2, 2, 1, 8, 512)).init_random()
    return LLM.from_loaded(model, Letters(), num_kv_blocks=100, max_num_batched_tokens=64)  # type: ignore[arg-type]


def test_decode_steps_are_one_point_and_prompts_one_each(llm: LLM, clock: object) -> None:
    script = Script("two", (Wave(0, 2, 40),), decode_steps=4)
    points = measure_training_steps(llm, "small", [script], rounds=3)
    shapes = [point.shape for point in points]
    # 64 tokens a step: the first prompt whole and 24 tokens of the second, then the rest beside the first's decode.
    assert [shape.chunks for shape in shapes] == [((0, 40), (0, 24)), ((24, 16),), ()]
    assert shapes[1].singles == 1
    assert shapes[2] == StepShape(2, 2, 2, singles=2, keys=42 + 1 + 41 + 3, window_keys=87)
    # The clock's whole seconds, one for each look that the engine takes at it.
    assert all(sample >= 1 and sample == int(sample) for point in points for sample in point.seconds.samples)
    assert [len(point.seconds.samples) for point in points] == [3, 3, 3 * 4]
    assert {(point.model, point.script) for point in points} == {("small", "two")}


def test_waves_come_when_they_say(llm: LLM) -> None:
    script = Script("waves", (Wave(0, 3, 5), Wave(2, 1, 20)), decode_steps=2)
    shapes = [point.shape for point in measure_training_steps(llm, "small", [script], rounds=1)]
    assert [(shape.singles, len(shape.chunks)) for shape in shapes] == [(0, 3), (3, 0), (3, 1), (4, 0)]


def test_all_scripts_run_in_each_round_and_take_turns_at_the_start(llm: LLM) -> None:
    scripts = [Script(name, (Wave(0, 1, 3),), 1) for name in ("a", "b", "c")]
    order: list[str] = []
    measure_training_steps(llm, "small", scripts, rounds=3, announce=order.append)
    assert "".join(order) == "abcbcacab"


def test_nothing_is_left_behind_and_no_prompt_finds_an_earlier_one(llm: LLM) -> None:
    before = llm.engine.kv.usage().hit_tokens
    for _ in range(2):
        measure_training_steps(llm, "small", [Script("a", (Wave(0, 2, 30),), 1)], rounds=2)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.kv.usage().held_blocks == 0
    assert llm.engine.kv.usage().hit_tokens == before


def test_two_different_plans_of_a_script_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter([(Wave(0, 1, 3),), (Wave(0, 1, 4),)])
    real = training_steps._run

    def run(llm: LLM, script: Script, source: object) -> object:
        return real(llm, Script(script.name, next(lengths), script.decode_steps), source)  # type: ignore[arg-type]

    monkeypatch.setattr(training_steps, "_run", run)
    with pytest.raises(EngineError, match="planned the steps of 'a' in two ways"):
        measure_training_steps(llm, "small", [Script("a", (Wave(0, 1, 3),), 1)], rounds=2)


@pytest.mark.parametrize("wave", [Wave(0, 65, 1), Wave(0, 1, 500), Wave(0, 30, 80)])
def test_a_script_that_does_not_fit_is_refused_before_anything_runs(llm: LLM, wave: Wave) -> None:
    with pytest.raises(InvalidArgumentError, match="script 'large' needs"):
        measure_training_steps(llm, "small", [Script("large", (wave,))])


def test_rounds_below_one_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="rounds=0"):
        measure_training_steps(llm, "small", rounds=0)


def test_the_error_of_a_request_ends_the_measurement(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(llm.engine.runner, "forward", broken)
    with pytest.raises(EngineError, match="no memory"):
        measure_training_steps(llm, "small", [Script("a", (Wave(0, 1, 3),), 1)], rounds=1)
    assert not llm.engine.has_unfinished_requests()


def test_the_designed_scripts_fit_their_models_and_cover_batches_contexts_and_chunks() -> None:
    for scripts, model in ((SCRIPTS, "smollm2-135m"), (TINY_SCRIPTS, "tiny")):
        assert max(script.longest for script in scripts) <= get_model_shape(model).max_position
        assert len({script.name for script in scripts}) == len(scripts)
    # One GiB of smollm2's cache, in bfloat16.
    assert max(script.num_tokens for script in SCRIPTS) + 64 * 16 < 2**30 // (2 * 30 * 3 * 64 * 2)
    first = [script.waves[0] for script in SCRIPTS]
    assert {1, 4, 16, 64} <= {wave.num_prompts for wave in first}
    assert max(wave.length for wave in first) > 2048
    assert any(len(script.waves) > 2 for script in SCRIPTS)
