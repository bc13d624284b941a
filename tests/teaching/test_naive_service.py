"""The baseline: one request at a time, and nothing else in between."""

import asyncio

from vllm_teach.models import load_tokenizer, resolve_model
from vllm_teach.performance.load_test import ClosedLoop, LoadPlan, ServeBench, ServeBenchOptions, Target
from vllm_teach.performance.load_test.spans import measure_spans
from vllm_teach.teaching.naive_service import NaiveService


def test_requests_come_one_after_the_other() -> None:
    running, most, order = 0, 0, []

    def generate(prompt: list[int], tokens: int) -> str:
        nonlocal running, most
        running, order[len(order) :] = running + 1, [tokens]
        most = max(most, running)
        running -= 1
        return "x" * tokens

    with NaiveService(generate) as service:
        spans = asyncio.run(measure_spans(Target(service.url), [([1, 2], n) for n in (3, 1, 2)], model="naive"))
    assert sorted(order) == [1, 2, 3]
    assert most == 1
    assert len(spans.requests) == 3
    assert spans.seconds == max(end for _, end in spans.requests)
    assert all(begin <= end for begin, end in (*spans.requests, *spans.health))


def test_the_load_client_can_measure_it() -> None:
    options = ServeBenchOptions(stream=False, max_total=64)
    plan = LoadPlan(ClosedLoop(2), num_requests=5, lengths=(4, 3))
    with NaiveService(lambda prompt, tokens: f"{len(prompt)} {tokens}") as service:
        tokenizer = load_tokenizer(resolve_model("tiny"))
        report = asyncio.run(ServeBench(Target(service.url), plan, options, tokenizer=tokenizer).run())
    assert report.tally.outcomes["answered"] == 5
    assert report.tally.output_tokens == 15
