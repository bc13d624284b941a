"""`python -m vllm_teach.validation.serving_overhead`: what of the offline engine's throughput is left through HTTP.

Each round generates the same requests twice: by an engine in this process, which is given all of them at once, and by
`vllm-teach serve`, which many clients ask, each for one at a time. Both batch as far as they get requests to batch; the
ratio is what the server, its messages and its clients cost. Rounds alternate who comes first, because machines drift.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_teach import LLM, SamplingParams
from vllm_teach.kvcache.length_mix import LengthMix
from vllm_teach.models import Tokenizer, load_tokenizer, resolve_model
from vllm_teach.performance.load_test.arrivals import ClosedLoop
from vllm_teach.performance.load_test.bench import ServeBench, ServeBenchOptions
from vllm_teach.performance.load_test.plan import LoadPlan
from vllm_teach.performance.load_test.prompts import PromptSource, load_text_ids
from vllm_teach.performance.load_test.record import ANSWERED
from vllm_teach.performance.load_test.target import LocalCodec, Target

_CONTEXT = 512
_MIX = LengthMix("chat", mean_prompt=64.0, mean_output=64.0, max_prompt=_CONTEXT // 2, max_total=_CONTEXT)


@dataclass(frozen=True)
class Round:
    """Output tokens per second of the same requests, offline and through HTTP."""

    offline: float
    http: float

    @property
    def ratio(self) -> float:
        """HTTP's throughput in offline's."""
        return self.http / self.offline


@contextmanager
def serving(model: str, clients: int) -> Iterator[str]:
    """Run `vllm-teach serve` in float32 on a free port of this machine, and yield its address.

    Without a prefix cache: rounds that meet their own prompts again would measure the cache.
    """
    command = [sys.executable, "-m", "vllm_teach.cli", "serve", "--model", model, "--dtype", "float32", "--port", "0"]
    command += ["--max-model-len", str(_CONTEXT), "--max-num-seqs", str(clients), "--no-enable-prefix-caching"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().rsplit(maxsplit=1)[-1]
        finally:
            server.send_signal(signal.SIGTERM)


def measure_overhead(model: str, requests: int, clients: int, rounds: int) -> Iterator[Round]:
    """Yield `rounds` comparisons, each of other requests. Raises AssertionError if one of them gets no answer."""
    llm = LLM(model, dtype="float32", max_model_len=_CONTEXT, max_num_seqs=clients, enable_prefix_caching=False)
    tokenizer = load_tokenizer(resolve_model(model))
    # Warm, as the server is by its plan's warm_up.
    _offline(llm, tokenizer, LoadPlan(num_requests=clients, lengths=_MIX))
    with serving(model, clients) as url:
        for seed in range(rounds):
            plan = LoadPlan(ClosedLoop(clients), requests, _MIX, seed=seed, warm_up=clients if seed == 0 else 0)
            if seed % 2:
                http = _through_http(url, plan, tokenizer)
                yield Round(_offline(llm, tokenizer, plan), http)
            else:
                offline = _offline(llm, tokenizer, plan)
                yield Round(offline, _through_http(url, plan, tokenizer))


def _offline(llm: LLM, tokenizer: Tokenizer, plan: LoadPlan) -> float:
    source = PromptSource(asyncio.run(load_text_ids(LocalCodec(tokenizer))), plan.seed)
    planned = list(plan.requests())
    prompts = [source.ids(each.index, each.prompt_len) for each in planned]
    params = [SamplingParams(temperature=0, max_tokens=each.output_len, ignore_eos=True) for each in planned]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(each.outputs[0].token_ids) for each in outputs) / (time.perf_counter() - started)


def _through_http(url: str, plan: LoadPlan, tokenizer: Tokenizer) -> float:
    bench = ServeBench(Target(url), plan, ServeBenchOptions(stream=False), tokenizer=tokenizer)
    tally = asyncio.run(bench.run()).tally
    assert tally.outcomes[ANSWERED] == plan.num_requests, tally.outcomes
    return tally.rate(tally.output_tokens)


def main() -> None:
    """Measure as the arguments say, and print each round, the median and the spread."""
    parser = argparse.ArgumentParser(prog="serving_overhead", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=128, help="of a round (default: 128)")
    parser.add_argument("--clients", type=int, default=64, help="at once (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    arguments = parser.parse_args()
    ratios = []
    for each in measure_overhead(arguments.model, arguments.requests, arguments.clients, arguments.rounds):
        ratios.append(each.ratio)
        print(f"offline {each.offline:.0f} tokens/s, HTTP {each.http:.0f} tokens/s: {each.ratio:.3f}", flush=True)
    print(f"HTTP reaches {statistics.median(ratios):.3f} of offline ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
