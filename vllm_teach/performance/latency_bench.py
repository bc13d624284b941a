"""`vllm-teach bench latency`: what one batch waits for: its first tokens, each token after them, its end.

All requests of the batch are there at once and equally long, as in vLLM's `bench latency`; nothing else runs. A round
serves the batch once. Times count from the moment in which the batch is handed over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from vllm_teach import data
from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.llm import LLM
from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.throughput_bench import TEXT
from vllm_teach.performance.timing import Timing, check_calls
from vllm_teach.performance.virtual_time import quantile
from vllm_teach.performance.workload import Workload, draw_workload

PERCENTILES = (10, 25, 50, 75, 90, 99)  # as vLLM's
FIGURES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between two tokens",
    "latency": "the whole batch",
}


@dataclass(frozen=True)
class Batch:
    """How many requests, of how many tokens each, asking for how many; `seed` draws the prompts from a text."""

    size: int = 8
    input_len: int = 32
    output_len: int = 128
    seed: int = 0


@dataclass(frozen=True)
class LatencyBench:
    """The whole result, in seconds. `figures` has, by a key of FIGURES, the median of each round and their spread.

    "ttft" and "tpot" are per request, "itl" per token after a request's first, "latency" per round; `percentiles` are
    of all these of all rounds, by "p50" and so on. Without a second token there is no "tpot" and no "itl".
    """

    model: str
    dtype: str
    device: str
    batch: Batch
    warmup: int
    rounds: int
    figures: dict[str, Timing]
    percentiles: dict[str, dict[str, float]]
    environment: dict[str, object] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second while the batch runs, by the median round."""
        return self.batch.size * self.batch.output_len / self.figures["latency"].median

    def to_json(self) -> dict[str, object]:
        """Return the result as what `json.dump` takes."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def bench_latency(
    model: str | Path = "smollm2",
    *,
    batch: Batch | None = None,
    rounds: int = 5,
    warmup: int = 1,
    dtype: str = "bfloat16",
    device: str = "cpu",
    progress: bool = True,
) -> LatencyBench:
    """Serve the batch `warmup` + `rounds` times, greedily, to its last token; the prefix cache is off.

    Raises InvalidArgumentError for `rounds` below 1, `warmup` below 0, a batch that the KV cache does not hold at once
    or that is longer than the model's context; ModelNotFoundError if the model is not here; EngineError if a request
    fails or has no times.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    check_calls("warmup", warmup, 0, "is no number of rounds")
    batch = batch or Batch()
    llm = LLM(
        model,
        dtype=dtype,
        device=device,
        enable_prefix_caching=False,
        max_num_seqs=max(EngineConfig.max_num_seqs, batch.size),
        max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, batch.size),
        watermark=0,  # nobody else comes
    )
    length, longest = batch.input_len + batch.output_len, llm.engine.max_model_len
    if length > longest:
        raise InvalidArgumentError(f"batch has {length} tokens a request, but the model's context is {longest}.")
    text_ids = llm.tokenizer.encode(data.path(TEXT).read_text(encoding="utf-8"))
    inputs, outputs = (batch.input_len, batch.input_len), (batch.output_len, batch.output_len)
    workload = draw_workload(text_ids, batch.size, inputs=inputs, outputs=outputs, seed=batch.seed)
    samples: dict[str, list[list[float]]] = {name: [] for name in FIGURES}  # by figure, by round
    with tqdm(total=warmup + rounds, desc="bench latency", disable=not progress) as bar:
        for number in range(warmup + rounds):
            found = serve_once(llm, workload)
            bar.update()
            if number >= warmup:
                for name, values in found.items():
                    samples[name].append(values)
    measured = {name: by_round for name, by_round in samples.items() if by_round[0]}
    return LatencyBench(
        str(model),
        str(llm.model.dtype).removeprefix("torch."),
        device,
        batch,
        warmup,
        rounds,
        {name: Timing.of([statistics.median(each) for each in by_round]) for name, by_round in measured.items()},
        {name: _percentiles(value for each in by_round for value in each) for name, by_round in measured.items()},
        asdict(describe_environment()),
    )


def serve_once(llm: LLM, workload: Workload) -> dict[str, list[float]]:
    """Serve all requests together and return the seconds of each key of FIGURES.

    Raises InvalidArgumentError if the KV cache does not hold all of them at once, and EngineError if a request got
    another length than it asked for, or if the engine did not note when each of its tokens came.
    """
    kv = llm.engine.kv
    totals = (len(prompt) + count for prompt, count in zip(workload.prompts, workload.output_lens, strict=True))
    blocks = sum(-(-total // kv.block_size) for total in totals)
    if blocks > kv.num_blocks:
        raise InvalidArgumentError(
            f"batch needs {blocks} blocks of {kv.block_size} tokens in the KV cache, which has {kv.num_blocks}: use a "
            "smaller or a shorter one."
        )
    prompts, params = [list(prompt) for prompt in workload.prompts], workload.sampling_params()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    latency = time.perf_counter() - start
    workload.check_served(outputs)
    times = [output.metrics.token_times if output.metrics else [] for output in outputs]
    if tuple(map(len, times)) != workload.output_lens:
        raise EngineError("the engine kept no time of some tokens: what they waited for is not known.")
    return {
        "ttft": [each[0] - start for each in times],
        "tpot": [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1],
        "itl": [later - before for each in times for before, later in pairwise(each)],
        "latency": [latency],
    }


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {f"p{percent}": quantile(values, percent / 100) for percent in PERCENTILES}


def format_latency(bench: LatencyBench) -> str:
    """Return the result as a table of plain text, in milliseconds."""
    batch, threads = bench.batch, bench.environment.get("torch_threads")
    names = [f"p{percent}" for percent in PERCENTILES]
    lines = [
        f"{bench.model}, {bench.dtype}, {bench.device}, {threads} threads: a batch of {batch.size} requests, "
        f"{batch.input_len} tokens in, {batch.output_len} out, {bench.tokens_per_second:,.1f} output tokens a second",
        "",
        f"  {'ms':<24}{f'median of {bench.rounds} rounds (their range)':<37}" + "".join(f"{name:>9}" for name in names),
    ]
    for name, timing in bench.figures.items():
        spread = f"{timing.median * 1e3:9,.2f}  ({timing.low * 1e3:,.2f} to {timing.high * 1e3:,.2f})"
        percentiles = "".join(f"{bench.percentiles[name][each] * 1e3:9,.2f}" for each in names)
        lines.append(f"  {FIGURES[name]:<24}{spread:<37}{percentiles}")
    return "\n".join([*lines, "", f"  percentiles over all requests, tokens and rounds; {bench.warmup} more warmed up"])
