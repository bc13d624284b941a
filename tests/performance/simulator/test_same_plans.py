"""The simulated scheduler plans what the real engine plans, step by step, for the same requests at the same times."""

import random
from dataclasses import replace
from typing import Any

import pytest

from vllm_teach.engine.events import Arrived, EventLog, LogEntry, StepEnded
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.plan import Plan
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.engine.scheduler import Scheduler
from vllm_teach.performance.simulator.deployment import deploy
from vllm_teach.performance.simulator.traffic import Traffic
from vllm_teach.performance.virtual_time import Arrival, StepCost, make_sequence, put_on_virtual_time

COST = StepCost(step=1.0, token=0.01, pair=1e-4, swapped_token=0.02)
SMALL = {"num_kv_blocks": 24, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 32, "watermark": 0.0}


def traffic(shared: int = 0, seed: int = 0) -> Traffic:
    source, moment, arrivals = random.Random(seed), 0.0, []
    for _ in range(16):
        prompt, output = source.randint(1, 70), source.randint(1, 24)
        arrivals.append(Arrival(prompt, output, moment, source.randrange(3)))
        moment += source.choice((0.0, 0.4, 1.0, 6.0))
    arrivals.append(Arrival(20, 5, moment + 500.0))  # after an idle time
    return Traffic(tuple(arrivals), "mixed", "by hand").with_shared_prefix(shared, 2)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What every scheduler plans from now on, as plain data."""
    planned: list[tuple[object, ...]] = []
    schedule = Scheduler.schedule

    def record(self: Scheduler) -> Plan:
        plan = schedule(self)
        items = [(i.sequence.seq_id, i.start, i.num_tokens, i.samples, tuple(i.blocks)) for i in plan.items]
        planned.append((plan.step, items, plan.transfers, [each.seq_id for each in plan.preempted]))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", record)
    return planned


def serve_for_real(workload: Traffic, settings: dict[str, Any]) -> LLM:
    """Send the requests to a real engine whose clock is virtual, each when its time has come."""
    llm = LLM("tiny", device="cpu", dtype="float32", **settings)
    engine = llm.engine
    clock = put_on_virtual_time(engine, COST)
    vocabulary = llm.model.config.vocab_size
    coming = sorted(workload.arrivals, key=lambda each: each.time)
    added = 0
    while added < len(coming) or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            clock.now = max(clock.now, coming[added].time)
        while added < len(coming) and coming[added].time <= clock.now:
            ids = [token % vocabulary for token in make_sequence(added, coming[added]).prompt_token_ids]
            params = SamplingParams(temperature=0, max_tokens=coming[added].output_len, ignore_eos=True)
            engine.add_request({"prompt_token_ids": ids}, params, priority=coming[added].priority)
            added += 1
        engine.step()
    return llm


def told(log: EventLog) -> list[LogEntry]:
    """The log without arrivals: who comes during a step comes then, and to the engine between two steps."""
    entries = [each for each in log if not isinstance(each.event, Arrived)]
    return [
        each._replace(event=replace(each.event, num_waiting=0)) if isinstance(each.event, StepEnded) else each
        for each in entries
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batching": "static"},
        {"batching": "prefill_first"},
        {"enable_chunked_prefill": False},
        {"scheduling_policy": "priority"},
        {"long_prefill_token_threshold": 9},
        {"watermark": 0.2},
        {"preemption_mode": "swap", "swap_space": 0.01},
        {"preemption_mode": "auto", "swap_space": 0.01},
        {"kv_placement": "prefer_contiguous"},
        {"enable_prefix_caching": False},
        {"prefix_cache": "radix", "eviction_policy": "lfu"},
        {"num_kv_blocks": 200, "max_num_batched_tokens": 256},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_plans_and_events_are_the_same(plans: list[tuple[object, ...]], settings: dict[str, Any]) -> None:
    settings, workload = {**SMALL, **settings}, traffic(shared=24)
    llm = serve_for_real(workload, settings)
    real, counts = list(plans), llm.engine.scheduler.preemptions
    plans.clear()
    same = llm.engine.scheduler.config.costs  # "auto" would weigh another machine's
    run = deploy("tiny", "l4", dtype="float32", cost=COST, preemption_costs=same, **settings).simulate(workload)
    assert plans == real
    assert run.num_preemptions == counts.total()
    if settings["num_kv_blocks"] == SMALL["num_kv_blocks"] and settings["watermark"] == 0:
        assert counts.total() > 0, "a pool this small preempts"
    assert told(run.events) == told(llm.engine.events)


def test_another_workload_has_other_plans(plans: list[tuple[object, ...]]) -> None:
    workload = traffic()
    deployment = deploy("tiny", "l4", dtype="float32", cost=COST, **SMALL)
    deployment.simulate(workload)
    first = list(plans)
    plans.clear()
    longer = replace(workload.arrivals[3], output_len=workload.arrivals[3].output_len + 1)
    deployment.simulate(replace(workload, arrivals=(*workload.arrivals[:3], longer, *workload.arrivals[4:])))
    assert plans != first


def test_the_tiny_models_vocabulary_tells_all_prompts_apart() -> None:
    config = deploy("tiny", "l4", dtype="float32").shape
    heads = {make_sequence(index, Arrival(1, 1)).prompt_token_ids[0] for index in range(17)}
    heads |= {make_sequence(0, Arrival(2, 1, prefix_len=1, prefix_group=group)).prompt_token_ids[0] for group in (0, 1)}
    assert len({head % config.vocab_size for head in heads}) == 19
