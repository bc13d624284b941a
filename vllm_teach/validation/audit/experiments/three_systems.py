"""The three systems of the articles' tables, run by our own engine on a real model, under the same requests.

- *original*: plain attention, a contiguous reservation of the longest sequence for each, batches that wait for their
  longest output. One block as long as the longest sequence is such a reservation.
- *flash*: the same with tiled attention.
- *full*: paged memory, continuous batching, chunked prefill, tiled attention.

All have the same bytes for K and V. No prefix cache: a customer's first question is nobody else's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_teach.performance.timing import Timing
from vllm_teach.validation.audit.experiments.attention_speed import tiled_backend
from vllm_teach.validation.audit.lab import MODEL, Lab

if TYPE_CHECKING:
    from vllm_teach.engine.llm import LLM
    from vllm_teach.engine.outputs import RequestOutput

SYSTEMS = ("original", "flash", "full")
MAX_LEN = 512
RESERVED = 4
"""Sequences that the memory holds at their longest: what article B says fits of its model at 2,048 tokens."""
_LOAD = 0.8
_TEXT = "texts/corran_sound.txt"


@dataclass(frozen=True)
class Job:
    """A request: its prompt's token ids, and how many tokens it is to get."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class SystemRun:
    """What one system did. `offline` has the seconds for all jobs at once, by round; latencies are of an open loop.

    `gaps` are the medians of the seconds between two tokens of a sequence, by round, all jobs at once. `peak_slots`
    are the most slots of the KV cache that were held, and `reserved_slots` what the same jobs would hold all at once.
    """

    offline: Timing
    gaps: Timing
    latencies: tuple[float, ...]
    peak_slots: int


@dataclass(frozen=True)
class ThreeSystems:
    """All three, the jobs they had, the open loop's rate in requests a second, and the bytes of weights and a slot."""

    runs: dict[str, SystemRun]
    jobs: tuple[Job, ...]
    rate: float
    weight_bytes: int
    slot_bytes: int
    score_bytes: int
    setting: str

    def ratio(self, slow: str, fast: str, of: Callable[[SystemRun], Timing] = lambda run: run.offline) -> Timing:
        """Return seconds of `slow` over those of `fast`, round by round."""
        pairs = zip(of(self.runs[slow]).samples, of(self.runs[fast]).samples, strict=True)
        return Timing.of([a / b for a, b in pairs])

    def p99(self, name: str, without: int | None = None) -> float:
        """Return the open loop's 99th percentile, of all requests or of those but one."""
        from vllm_teach.performance.virtual_time import quantile

        return quantile([s for i, s in enumerate(self.runs[name].latencies) if i != without], 0.99)

    def p99_ratio(self, slow: str, fast: str) -> Timing:
        """Return the ratio of two 99th percentiles; its spread is that of leaving each request out in turn."""
        whole = self.p99(slow) / self.p99(fast)
        parts = [self.p99(slow, i) / self.p99(fast, i) for i in range(len(self.jobs))]
        samples = [whole, *parts]
        return Timing(whole, min(samples), max(samples), tuple(samples))

    def memory(self, name: str) -> int:
        """Return the bytes to serve all jobs at once: weights, K and V, and the scores of plain attention."""
        slots = self.runs["full"].peak_slots if name == "full" else len(self.jobs) * MAX_LEN
        return self.weight_bytes + slots * self.slot_bytes + (self.score_bytes if name == "original" else 0)

    def cache(self, name: str) -> int:
        """Return the part of it that K and V take."""
        slots = self.runs["full"].peak_slots if name == "full" else len(self.jobs) * MAX_LEN
        return slots * self.slot_bytes


def run_three_systems(lab: Lab) -> ThreeSystems:
    """Serve the same jobs with each system: rounds of all at once, then once as an open loop.

    The loop's arrivals are Poisson's, the same for all, at 80 % of what the original manages. On a processor the model
    is the real one; on a GPU it is Llama-2-7B's shape with random weights. Raises ModelNotFoundError without the model.
    """
    from vllm_teach.models.decoder import Decoder

    engines = _engines(lab)
    jobs = draw_jobs(lab, next(iter(engines.values())))
    rounds = 5
    outputs: dict[str, list[list[RequestOutput]]] = {name: [] for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    peaks = dict.fromkeys(engines, 0)
    for llm in engines.values():
        _all_at_once(llm, jobs[:2])  # warms up, and builds the kernels
    for number in range(rounds):
        names = [*engines][number % 3 :] + [*engines][: number % 3]
        for name in names:
            spent, done, peaks[name] = _all_at_once(engines[name], jobs)
            seconds[name].append(spent)
            outputs[name].append(done)
    rate = _LOAD * len(jobs) / statistics.median(seconds["original"])
    source, moment, times = random.Random(0), 0.0, []
    for _ in jobs:
        times.append(moment)
        moment += source.expovariate(rate)
    runs = {
        name: SystemRun(
            Timing.of(seconds[name]),
            Timing.of([_median_gap(done) for done in outputs[name]]),
            tuple(_open_loop(llm, jobs, times)),
            peaks[name],
        )
        for name, llm in engines.items()
    }
    full = engines["full"]
    assert isinstance(full.model, Decoder)
    longest = max(len(job.prompt) for job in jobs)
    shape, dtype = full.model.config, full.model.dtype
    return ThreeSystems(
        runs,
        jobs,
        rate,
        full.model.num_bytes(),
        shape.kv_bytes_per_token(dtype.itemsize),
        2 * shape.num_q_heads * longest**2 * dtype.itemsize,
        _in_words(lab, jobs, full),
    )


def draw_jobs(lab: Lab, llm: LLM) -> tuple[Job, ...]:
    """Return requests as a customer service has them: short questions of one length or another, short answers."""
    from vllm_teach import data
    from vllm_teach.kvcache.length_mix import LengthMix

    count, prompt, output = lab.pick((24, 128, 32), (8, 32, 8))
    mix = LengthMix("service", prompt, output, 0.6, 0.8, max_prompt=MAX_LEN // 2, max_total=MAX_LEN)
    ids = lab.tokenizer.encode(data.path(_TEXT).read_text(encoding="utf-8"))
    source = random.Random(0)
    jobs = []
    for prompt_len, output_len in mix.draw(count, seed=1):
        start = source.randrange(len(ids) - prompt_len)
        tokens = tuple(token % llm.model.config.vocab_size for token in ids[start : start + prompt_len])
        jobs.append(Job(tokens, output_len))
    return tuple(jobs)


def _engines(lab: Lab) -> dict[str, LLM]:
    """Return an engine for each system, around one model."""
    from vllm_teach import LLM

    first = _load(lab)
    tiled = tiled_backend(lab.device)
    reserving: dict[str, Any] = {
        "batching": "static", "block_size": MAX_LEN, "num_kv_blocks": RESERVED, "max_num_seqs": RESERVED,
    }  # fmt: skip
    paged = {"block_size": 16, "num_kv_blocks": RESERVED * MAX_LEN // 16, "max_num_seqs": 64}
    settings = {
        "original": {**reserving, "attention_backend": "naive"},
        "flash": {**reserving, "attention_backend": tiled},
        "full": {**paged, "attention_backend": tiled},
    }
    common: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": MAX_LEN}
    return {name: LLM.from_loaded(first.model, first.tokenizer, **common, **each) for name, each in settings.items()}


def _load(lab: Lab) -> LLM:
    from vllm_teach import LLM

    if not lab.on_gpu:
        return LLM(MODEL, device="cpu", num_kv_blocks=64)
    import torch

    from vllm_teach.models.decoder import Decoder
    from vllm_teach.performance.model_shapes import get_model_shape

    model = Decoder(get_model_shape("llama-2-7b")).init_random(dtype=torch.float16, device=lab.device)
    return LLM.from_loaded(model, lab.tokenizer, num_kv_blocks=64)


def _all_at_once(llm: LLM, jobs: Sequence[Job]) -> tuple[float, list[RequestOutput], int]:
    """Return the seconds for all jobs, their outputs, and the most slots that they held."""
    started = time.perf_counter()
    for job in jobs:
        llm.engine.add_request({"prompt_token_ids": list(job.prompt)}, _params(job))
    done, peak = [], 0
    while llm.engine.has_unfinished_requests():
        done += [output for output in llm.engine.step() if output.finished]
        peak = max(peak, llm.engine.kv.pool.num_held)
    return time.perf_counter() - started, done, peak * llm.engine.kv.block_size


def _open_loop(llm: LLM, jobs: Sequence[Job], times: Sequence[float]) -> list[float]:
    """Return the seconds from each job's arrival to its end, whether the engine is ready for it or not."""
    engine = llm.engine
    started = time.perf_counter()
    due: dict[str, int] = {}
    ended = [0.0] * len(jobs)
    number = 0
    while number < len(jobs) or engine.has_unfinished_requests():
        now = time.perf_counter() - started
        while number < len(jobs) and times[number] <= now:
            due[engine.add_request({"prompt_token_ids": list(jobs[number].prompt)}, _params(jobs[number]))] = number
            number += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, times[number] - now))
            continue
        for output in engine.step():
            if output.finished:
                ended[due[output.request_id]] = time.perf_counter() - started
    return [end - begin for begin, end in zip(times, ended, strict=True)]


def _params(job: Job) -> Any:
    from vllm_teach import SamplingParams

    return SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True, detokenize=False)


def _median_gap(outputs: Sequence[RequestOutput]) -> float:
    """Return the median of the seconds between two tokens of a sequence."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    return statistics.median(gap for each in metrics for gap in each.inter_token_times)


def _in_words(lab: Lab, jobs: Sequence[Job], llm: LLM) -> str:
    tokens, new = sum(len(job.prompt) for job in jobs) / len(jobs), sum(job.output_len for job in jobs) / len(jobs)
    name = f"{MODEL}" if not lab.on_gpu else "Llama-2-7B's shape, random weights"
    return (
        f"{name}, {str(llm.model.dtype).removeprefix('torch.')}, {len(jobs)} requests of {tokens:.0f} tokens in and "
        f"{new:.0f} out on average; K and V for {RESERVED} sequences of {MAX_LEN}, {lab.label}"
    )
