"""The three systems of the articles' tables, run by our own engine on a real model, under the same requests.

- *original*: plain attention, in decode steps over the padded batch, a contiguous reservation of the longest sequence
  for each, batches that wait for their longest output. One block as long as the longest sequence is such a reservation.
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
_LOAD, _ROUNDS = 0.8, 5
_TEXT = "texts/corran_sound.txt"


@dataclass(frozen=True)
class Job:
    """A request: its prompt's token ids, and how many tokens it is to get."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class SystemRun:
    """What one system did, by round. `offline` are the seconds for all jobs at once, and `gaps` the medians of the
    seconds between two tokens of a sequence there; `p99` is the 99th percentile of the latencies of an open loop.

    `peak_slots` are the most slots of the KV cache that were held, and `steps` how many the engine took for all jobs.
    """

    offline: Timing
    gaps: Timing
    p99: Timing
    peak_slots: int
    steps: int


@dataclass(frozen=True)
class ThreeSystems:
    """All three, the jobs they had, how many of them an open loop had and at which rate, in requests a second.

    `weight_bytes` are the model's, `slot_bytes` those of K and V of a token, and `score_bytes` those of plain attention
    over the longest prompt.
    """

    runs: dict[str, SystemRun]
    jobs: tuple[Job, ...]
    num_in_loop: int
    rate: float
    weight_bytes: int
    slot_bytes: int
    score_bytes: int
    setting: str

    def ratio(self, slow: str, fast: str, of: Callable[[SystemRun], Timing] = lambda run: run.offline) -> Timing:
        """Return seconds of `slow` over those of `fast`, round by round."""
        pairs = zip(of(self.runs[slow]).samples, of(self.runs[fast]).samples, strict=True)
        return Timing.of([a / b for a, b in pairs])

    def memory(self, name: str) -> int:
        """Return the bytes to serve all jobs at once: weights, K and V, and the scores of plain attention."""
        return self.weight_bytes + self.cache(name) + (self.score_bytes if name == "original" else 0)

    def cache(self, name: str) -> int:
        """Return the part of it that K and V take: slots held where they are paged, else a reservation for each job."""
        slots = self.runs["full"].peak_slots if name == "full" else len(self.jobs) * MAX_LEN
        return slots * self.slot_bytes


def run_three_systems(lab: Lab) -> ThreeSystems:
    """Serve the same jobs with each system: rounds of all at once, then rounds of an open loop, in turns.

    The loop's arrivals are Poisson's, drawn anew in each round and the same for all, at 80 % of what the original
    manages. On a processor the model is the real one; on a GPU it is Llama-2-7B's shape with random weights. Raises
    ModelNotFoundError without the model.
    """
    from vllm_teach.models.decoder import Decoder
    from vllm_teach.performance.simulator.traffic import draw_times
    from vllm_teach.performance.virtual_time import quantile

    engines = _engines(lab)
    jobs = draw_jobs(lab, next(iter(engines.values())))
    outputs: dict[str, list[list[RequestOutput]]] = {name: [] for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    p99: dict[str, list[float]] = {name: [] for name in engines}
    peaks, steps = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    for llm in engines.values():
        _all_at_once(llm, jobs[:2])  # warms up, and builds the kernels
    for number in range(_ROUNDS):
        for name in _in_turn(number):
            spent, done, peaks[name], steps[name] = _all_at_once(engines[name], jobs)
            seconds[name].append(spent)
            outputs[name].append(done)
    rate = _LOAD * len(jobs) / statistics.median(seconds["original"])
    in_loop = jobs[: lab.pick(len(jobs), len(jobs) // 2)]
    for number in range(_ROUNDS):
        times = draw_times(len(in_loop), rate, seed=number)
        for name in _in_turn(number):
            p99[name].append(quantile(_open_loop(engines[name], in_loop, times), 0.99))
    runs = {
        name: SystemRun(
            Timing.of(seconds[name]),
            Timing.of([_median_gap(done) for done in outputs[name]]),
            Timing.of(p99[name]),
            peaks[name],
            steps[name],
        )
        for name in engines
    }
    full = engines["full"]
    assert isinstance(full.model, Decoder)
    longest = max(len(job.prompt) for job in jobs)
    shape, dtype = full.model.config, full.model.dtype
    return ThreeSystems(
        runs,
        jobs,
        len(in_loop),
        rate,
        full.model.num_bytes(),
        shape.kv_bytes_per_token(dtype.itemsize),
        2 * shape.num_q_heads * longest**2 * dtype.itemsize,
        _in_words(lab, jobs, full),
    )


def _in_turn(number: int) -> list[str]:
    """Return the systems in another order in each round, as a slow minute must not always meet the same."""
    turn = number % len(SYSTEMS)
    return [*SYSTEMS[turn:], *SYSTEMS[:turn]]


def draw_jobs(lab: Lab, llm: LLM) -> tuple[Job, ...]:
    """Return requests as a customer service has them: short questions of one length or another, short answers."""
    from vllm_teach import data
    from vllm_teach.kvcache.length_mix import LengthMix

    # Several batches of the original: with two, nothing could serve the requests more than about twice as fast.
    count, prompt, output = lab.pick((32, 96, 16), (16, 16, 4))
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
    from vllm_teach.validation.audit.experiments.plain_batch import PlainBatchRunner

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
    engines = {name: LLM.from_loaded(first.model, first.tokenizer, **common, **each) for name, each in settings.items()}
    original = engines["original"].engine
    original.runner = PlainBatchRunner(original.model, original.runner.storage)
    return engines


def _load(lab: Lab) -> LLM:
    from vllm_teach import LLM

    if not lab.on_gpu:
        return LLM(MODEL, device="cpu", num_kv_blocks=64)
    import torch

    from vllm_teach.models.decoder import Decoder
    from vllm_teach.performance.model_shapes import get_model_shape

    model = Decoder(get_model_shape("llama-2-7b")).init_random(dtype=torch.float16, device=lab.device)
    return LLM.from_loaded(model, lab.tokenizer, num_kv_blocks=64)


def _all_at_once(llm: LLM, jobs: Sequence[Job]) -> tuple[float, list[RequestOutput], int, int]:
    """Return the seconds for all jobs, their outputs, the most slots that they held, and how many steps it took."""
    started = time.perf_counter()
    for job in jobs:
        llm.engine.add_request({"prompt_token_ids": list(job.prompt)}, _params(job))
    done, peak, steps = [], 0, 0
    while llm.engine.has_unfinished_requests():
        done += [output for output in llm.engine.step() if output.finished]
        peak, steps = max(peak, llm.engine.kv.pool.num_held), steps + 1
    return time.perf_counter() - started, done, peak * llm.engine.kv.block_size, steps


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
