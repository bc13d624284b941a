"""Sums over a plan, against what the plan says of itself."""

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.performance.cost_model.step_shape import Item, StepShape


def test_by_hand() -> None:
    items = [Item(9, 1), Item(4, 1), Item(0, 3, samples=False), Item(2, 5)]
    assert StepShape.of(items) == StepShape(
        sequences=4, tokens=10, samples=3, singles=2, keys=15, window_keys=15, chunks=((0, 3), (2, 5))
    )
    assert StepShape.of(items, window=7).window_keys == 7 + 5
    assert StepShape.of([]) == StepShape(0, 0, 0)


def test_blocks_on_their_way() -> None:
    transfers = [
        Transfer("swap_out", ((0, 0), (1, 1))),
        Transfer("copy", ((0, 5),)),
        Transfer("swap_in", ((0, 2),)),
        Transfer("move", ((7, 8),)),
    ]
    shape = StepShape.of([], transfers)
    assert (shape.swapped_blocks, shape.copied_blocks) == (3, 2)


def test_the_plans_of_an_engine_add_up() -> None:
    llm = LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=40, max_num_seqs=8, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for length in (30, 5, 1):
        llm.engine.add_request({"prompt_token_ids": list(range(1, length + 1))}, params)
    sampled = computed = 0
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        plan = llm.engine.last_plan
        shape = StepShape.of(plan.items, plan.transfers)
        assert shape.tokens == plan.num_tokens == shape.singles + sum(count for _, count in shape.chunks)
        assert shape.sequences == len(plan.items) == shape.singles + len(shape.chunks)
        assert shape.keys == sum(item.context_len for item in plan.items if item.num_tokens == 1)
        sampled, computed = sampled + shape.samples, computed + shape.tokens
    assert sampled == 3 * 4
    assert computed == 36 + 3 * 3  # the last token of each is never computed
