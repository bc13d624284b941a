"""Runs the requests through an engine and keeps what it did: the tokens, and whether it did what it was set up for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.engine.events import Admitted, Forked, Preempted
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.request import Request
from vllm_teach.validation.equivalence.workload import Asked

LEAST_PREEMPTIONS = 20


@dataclass(frozen=True)
class Served:
    """The finished requests, in the order they were asked, and counts of events.

    `preemptions` by mode, "recompute" and "swap"; `hit_tokens` that came from the prefix cache, those found again
    after a preemption included; blocks still held at the end; the most blocks held at the end of any step.
    """

    requests: list[Request]
    preemptions: dict[str, int]
    hit_tokens: int
    num_forks: int
    blocks_left: int
    most_blocks_held: int
    seconds: float


def serve(llm: LLM, asked: Sequence[Asked], logprobs: int | None = None) -> Served:
    """Send each request at its step and run to the end. Raises the first error of a request."""
    engine = llm.engine
    started = time.perf_counter()
    coming = sorted(range(len(asked)), key=lambda index: asked[index].arrival_step)
    found: dict[int, Request] = {}
    step = most_held = 0
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            step = max(step, asked[coming[0]].arrival_step)
        while coming and asked[coming[0]].arrival_step <= step:
            index = coming.pop(0)
            one = asked[index]
            name = engine.add_request(
                {"prompt_token_ids": list(one.prompt)}, one.params(logprobs), priority=one.priority
            )
            found[index] = engine.get_request(name)
        engine.step()
        step += 1
        most_held = max(most_held, engine.kv.pool.num_held)
    requests = [found[index] for index in range(len(asked))]
    for request in requests:
        if request.error is not None:
            raise request.error
    modes = [event.mode for event in engine.events.of(Preempted)]
    return Served(
        requests,
        {mode: modes.count(mode) for mode in ("recompute", "swap")},
        sum(event.num_cached_tokens for event in engine.events.of(Admitted)),
        len(engine.events.of(Forked)),
        engine.kv.pool.num_held,
        most_held,
        time.perf_counter() - started,
    )
