"""Choosing an attention implementation, and serving short and long requests at once (B-selection)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_teach.validation.audit.check import at_least, at_most
from vllm_teach.validation.audit.experiment import experiment
from vllm_teach.validation.audit.finding import MEASURED, Finding, counted
from vllm_teach.validation.audit.lab import Lab

_TABLE = "B-selection"


@experiment(
    _TABLE,
    "attention_implementation_chosen_by_sequence",
    at_most(
        "the rule chooses well", "time by the rule / by the best choice", 1.1,
        "a tenth more than the fastest backend of each call, on geometric average: a rule should cost no more",
    ),
    at_least(
        "the batch size is adjusted dynamically", "late requests that join a running batch", 1.0,
        "in a static batch none does; that a batch shrinks as answers end is no adjustment",
    ),
)  # fmt: skip
def rule(lab: Lab) -> Iterator[Finding]:
    """Time every usable backend on six calls and set the choice of the articles' rule beside the fastest one."""
    from vllm_teach.performance.audit import audit

    verdicts = audit("threshold", device=lab.device, rounds=lab.pick(9, 5))
    ratios = [each.ratio for each in verdicts]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    choices = ", ".join(f"{each.choice} for {each.fastest}" for each in verdicts if each.choice != each.fastest)
    yield Finding(
        "time by the rule / by the best choice", mean, "x", MEASURED,
        f"six calls, geometric mean, lowest and highest; chose {choices or 'the fastest each time'}, {lab.label}",
        min(ratios), max(ratios), len(ratios),
    )  # fmt: skip
    yield counted(
        "late requests that join a running batch", _late_joins(), "of one",
        "the tiny model; a short request comes when a long one has its fifth token, and ends before it",
    )  # fmt: skip


def _late_joins(batching: str = "continuous") -> int:
    """Return 1 if a short request that comes late ends while an earlier one still generates, else 0."""
    from vllm_teach import LLM, SamplingParams

    llm = LLM("tiny", dtype="float32", device="cpu", num_kv_blocks=32, batching=batching)
    engine = llm.engine

    def add(first: int, tokens: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return engine.add_request({"prompt_token_ids": list(range(first, first + 8))}, params)

    early = add(10, 40)
    for _ in range(5):
        engine.step()
    late = add(30, 4)
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    return int(ended.index(late) < ended.index(early))


@experiment(
    _TABLE,
    "one_service_handles_short_queries_and_long",
    at_least("all requests end", "requests answered", 1.0, "every one of them"),
    at_least("with the answers they would get alone", "answers as if alone", 1.0, "every one, token for token"),
    at_least("short ones need not wait for the long one's end", "short ones that end before the long one", 1.0, "all"),
)
def short_and_long(lab: Lab) -> Iterator[Finding]:
    """Serve one long prompt and six short ones at once, and each of them alone, and compare token for token."""
    same, before = _serve_short_and_long()
    setting = "the tiny model, float32, one prompt of 380 tokens and six of 8, budget of 64 tokens a step"
    yield counted("requests answered", len(same) / 7, "of all", setting)
    yield counted("answers as if alone", sum(same) / len(same), "of all", setting)
    yield counted("short ones that end before the long one", before, "of them", setting)


def _serve_short_and_long() -> tuple[list[bool], float]:
    """Return whether each answer is that of a lone run, and the share of short ones that ended before the long one."""
    from vllm_teach import LLM, SamplingParams

    llm = LLM(
        "tiny", dtype="float32", device="cpu", num_kv_blocks=96, max_num_batched_tokens=64, max_num_seqs=8,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompts = [[3 + i % 97 for i in range(380)], *([10 + i, *range(20, 27)] for i in range(6))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, *[8] * 6)]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [
        llm.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, one in zip(prompts, params, strict=True)
    ]
    same = [out.outputs[0].token_ids == tokens for out, tokens in zip(together, alone, strict=True)]
    ends = [out.metrics.finished_time or math.inf for out in together if out.metrics is not None]
    return same, sum(end < ends[0] for end in ends[1:]) / 6
