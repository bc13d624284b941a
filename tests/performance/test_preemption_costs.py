"""What is measured is what the cost model means; the clock is the test's."""

import pytest
import torch

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.preemption import PreemptionCosts
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance import preemption_costs
from vllm_teach.performance.preemption_costs import fit_prefill, measure_preemption_costs
from vllm_teach.performance.timing import Timing


class NoTokenizer:
    stop_token_ids = ()


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = Decoder(ModelConfig("LlamaForCausalLM", 90, 16, 24, 2, 2, 1, 8, 64)).init_random()
    return LLM.from_loaded(model, NoTokenizer(), block_size=4, num_kv_blocks=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(("token", "pair", "constant"), [(1e-3, 2e-6, 0.05), (2e-3, 0.0, 0.0)])
def test_the_fit_finds_what_the_times_were_made_of(token: float, pair: float, constant: float) -> None:
    lengths = (100, 230, 800)
    seconds = [constant + n * token + n**2 / 2 * pair for n in lengths]
    assert fit_prefill(lengths, seconds) == pytest.approx((token, pair))


def test_pairs_never_cost_less_than_nothing() -> None:
    assert fit_prefill((100, 200, 400), [0.1, 0.3, 0.4]) == (pytest.approx(1e-3), 0.0)


@pytest.mark.parametrize("seconds", [[0.1, 0.1, 0.1], [0.3, 0.2, 0.1], [0.1, 0.1, 0.9]])
def test_times_that_say_nothing_are_refused(seconds: list[float]) -> None:
    with pytest.raises(EngineError, match="measure again"):
        fit_prefill((100, 200, 400), seconds)


def test_costs_come_from_prompts_of_three_lengths_and_blocks_swapped_out_and_in(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, moved = [], []

    def clock(run, repeats, device):
        assert repeats == 5
        before = len(lengths), len(moved)
        run()
        if len(lengths) > before[0]:
            [n] = lengths[before[0] :]
            return Timing.of([0.5 + n * 1e-3 + n**2 / 2 * 1e-5])
        assert len(moved) > before[1]
        return Timing.of([1e-4])

    def generate(self, prompts, params, use_tqdm):
        lengths.append(len(prompts))
        assert self is not llm

    monkeypatch.setattr(LLM, "generate", generate)
    monkeypatch.setattr(
        "vllm_teach.kvcache.storage.KVStorage.apply",
        lambda self, transfers: moved.extend((each.kind, len(each.pairs)) for each in transfers),
    )
    monkeypatch.setattr(preemption_costs, "time_median", clock)
    costs = measure_preemption_costs(llm, longest=40, repeats=5, progress=False)
    assert lengths == [10, 20, 40]
    assert moved == [("swap_out", 11), ("swap_in", 11)]  # 41 tokens in blocks of 4
    assert costs.prefill_seconds_per_token == pytest.approx(1e-3)
    assert costs.attention_seconds_per_pair == pytest.approx(1e-5)
    assert costs.kv_bytes_per_token == 2 * 2 * 8 * 4  # K and V, layers, elements, bytes
    assert costs.swap_seconds(44) == pytest.approx(1e-4)  # what moving all of it there and back took


def test_it_really_runs_and_leaves_the_engine_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of so small a model say nothing, so the fit is left out."""
    monkeypatch.setattr(preemption_costs, "fit_prefill", lambda lengths, seconds: (seconds[-1], 0.0))
    storage, usage = llm.engine.runner.storage, llm.engine.kv.usage()
    storage.keys.fill_(3.0)
    costs = measure_preemption_costs(llm, longest=40, repeats=1, progress=False)
    assert costs.prefill_seconds_per_token > 0
    assert costs.swap_bytes_per_second > 0
    assert llm.engine.kv.usage() == usage
    assert not llm.engine.events
    assert torch.all(storage.keys == 3.0)


def test_an_engine_takes_the_costs_it_is_given(llm: LLM) -> None:
    costs = PreemptionCosts(prefill_seconds_per_token=0.5)
    given = LLM.from_loaded(llm.model, llm.tokenizer, num_kv_blocks=20, preemption_costs=costs)
    assert given.engine.scheduler.config.costs is costs
    assert llm.engine.scheduler.config.costs.kv_bytes_per_token == 2 * 2 * 8 * 4
    with pytest.raises(InvalidArgumentError, match=r"preemption_costs=3 is not valid"):
        LLM.from_loaded(llm.model, llm.tokenizer, preemption_costs=3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"longest": 3}, "longest=3"), ({"longest": 64}, "longest=64"), ({"repeats": 0}, "repeats")],
)
def test_what_measures_nothing_is_refused(llm: LLM, argument: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        measure_preemption_costs(llm, progress=False, **argument)
