"""`python -m vllm_teach.validation.serving_soak`: a server under a crowd, checked against the offline engine.

It starts `vllm-teach serve` on a free port of this machine, sends it some thousand requests of mixed lengths, of which
some hang up and some are malformed, asks `/health` all the while, and then says for every single request whether it got
the offline engine's answer (the beginning of it, where it hung up) or its right error; what the server still holds;
whether its memory grew; and how late its event loop was.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import EngineDeadError
from vllm_teach.kvcache.length_mix import LengthMix
from vllm_teach.models import load_tokenizer, resolve_model
from vllm_teach.performance.load_test.arrivals import ClosedLoop
from vllm_teach.performance.load_test.bench import ServeBench, ServeBenchOptions
from vllm_teach.performance.load_test.plan import LoadPlan
from vllm_teach.performance.load_test.prompts import PromptSource, load_text_ids
from vllm_teach.performance.load_test.record import ABORTED, ANSWERED, REFUSED, RequestRecord
from vllm_teach.performance.load_test.requests import malformed_way
from vllm_teach.performance.load_test.target import LocalCodec, Target
from vllm_teach.serving.metrics.scrape import fetch, scrape

_CONTEXT = 512
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 30.0
_RESPONSIVE_SECONDS = 1.0  # what a load balancer waits for /health, at least
_MOST_LAG = 0.1  # seconds
_MOST_GROWTH = 0.05
_END_SECONDS = 60.0


@dataclass
class Health:
    """What asking /health all the while gave: seconds of each answer, and what was no answer."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def watch(self, url: str) -> None:
        """Ask until cancelled."""
        while True:
            started = time.perf_counter()
            try:
                await asyncio.to_thread(fetch, url)
                self.seconds.append(time.perf_counter() - started)
            except OSError as error:
                self.failures.append(str(error))
            await asyncio.sleep(_POLL_SECONDS)


@dataclass
class SoakReport:
    """What became of the crowd. `wrong` are answers unlike the offline engine's and errors unlike the right ones, by
    their requests' indices; `held` is the share of the cache's blocks at the end.

    `memory` is the resident memory of the server's processes, in bytes, when a fifth of the requests had ended and when
    all had; `lag_p99` the bound of the histogram's bucket that holds the 99th percentile, in seconds.
    """

    outcomes: dict[str, int]
    failures: list[str]
    compared: int
    wrong: list[int]
    held: float
    memory: tuple[int, int]
    lag_p99: float
    health: Health
    exit_status: int

    @property
    def growth(self) -> float:
        """How much the memory grew, as a share."""
        return self.memory[1] / self.memory[0] - 1

    def broken(self) -> list[str]:
        """Return the limits that were not kept, in words."""
        found = {
            "a request failed": self.failures,
            "an answer is not the offline engine's, or a refusal not the right one": self.wrong,
            "blocks are held at the end": self.held,
            "/health did not always answer": self.health.failures,
            f"/health took over {_RESPONSIVE_SECONDS:g} s": max(self.health.seconds, default=0) > _RESPONSIVE_SECONDS,
            f"memory grew by {_MOST_GROWTH:.0%} or more": self.growth >= _MOST_GROWTH,
            f"the event loop's lag is above {1000 * _MOST_LAG:g} ms": self.lag_p99 > _MOST_LAG,
            "the server did not end with status 0": self.exit_status,
        }
        return [what for what, broken in found.items() if broken]

    def passed(self) -> bool:
        """Whether each limit was kept."""
        return not self.broken()

    def __str__(self) -> str:
        mib = [each / 2**20 for each in self.memory]
        waits = self.health.seconds
        return "\n".join(
            [
                f"outcomes: {self.outcomes}; failures: {self.failures[:3] or 'none'}",
                f"the offline engine's answer or the right error: {self.compared - len(self.wrong)} of {self.compared}",
                f"share of the KV cache held at the end: {self.held:g}",
                f"memory after a fifth and after all: {mib[0]:.0f} and {mib[1]:.0f} MiB ({self.growth:+.1%})",
                f"event loop's lag, 99th percentile: at most {1000 * self.lag_p99:g} ms",
                f"/health: {len(waits)} answers, the slowest after {1000 * max(waits, default=0):.0f} ms, "
                f"{len(self.health.failures)} failures",
                f"exit status after SIGTERM: {self.exit_status}",
                "passed" if self.passed() else f"FAILED: {'; '.join(self.broken())}",
            ]
        )


def run_soak(model: str, requests: int, clients: int, *, seed: int = 0, progress: bool = True) -> SoakReport:
    """Serve `model` in float32, send it `requests` from `clients` at once, and compare. Ends the server.

    Raises EngineDeadError when it does not start.
    """
    command = [sys.executable, "-m", "vllm_teach.cli", "serve", "--model", model, "--dtype", "float32", "--port", "0"]
    command += ["--max-queue", str(clients)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise EngineDeadError(f"the server of model={model!r} has not started: its standard error says why.")
            url = line.rsplit(maxsplit=1)[-1]
            plan = LoadPlan(
                ClosedLoop(clients), requests, _mix(), seed=seed, warm_up=20, abort_share=0.1, malformed_share=0.05
            )
            records, memory, health = asyncio.run(_load(url, plan, psutil.Process(server.pid), progress))
            held, lag = _settle(url)
        finally:
            exit_status = _end(server)
    outcomes = {
        name: sum(record.outcome == name for record in records) for name in sorted({r.outcome for r in records})
    }
    failures = [f"{r.error}: {r.message}" for r in records if r.outcome == "failed"]
    refused = [record for record in records if record.outcome == REFUSED]
    served = [record for record in records if record.outcome in (ANSWERED, ABORTED)]
    wrong = _not_rightly_refused(plan, refused) + _unlike_offline(model, plan, served, progress)
    compared = len(refused) + len(served)
    return SoakReport(outcomes, failures, compared, wrong, held, memory, lag, health, exit_status)


def _end(server: subprocess.Popen[str]) -> int:
    """Tell the server to end; return its exit status, which tells if it had to be killed."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _mix() -> LengthMix:
    return LengthMix("short", mean_prompt=40.0, mean_output=24.0, max_prompt=_CONTEXT // 2, max_total=_CONTEXT)


async def _load(
    url: str, plan: LoadPlan, server: psutil.Process, progress: bool
) -> tuple[list[RequestRecord], tuple[int, int], Health]:
    records: list[RequestRecord] = []
    memory: list[int] = []

    def note(record: RequestRecord) -> None:
        records.append(record)
        if len(records) in (max(1, plan.num_requests // 5), plan.num_requests):
            processes = [server, *server.children(recursive=True)]
            memory.append(sum(each.memory_info().rss for each in processes))
        if progress and len(records) % 500 == 0:
            print(f"{len(records)} of {plan.num_requests} ended", file=sys.stderr)

    health = Health()
    watching = asyncio.create_task(health.watch(f"{url}/health"))
    options = ServeBenchOptions(keep_text=True, max_total=_CONTEXT)
    await ServeBench(Target(url), plan, options, on_record=note).run()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return records, (memory[0], memory[-1]), health


def _settle(url: str) -> tuple[float, float]:
    """Return the share of the cache that is held when nobody is there any more, and the lag's 99th percentile."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        page = scrape(url)
        held = page.value("vllm:kv_cache_usage_perc")
        if not held or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    buckets = page.buckets("vllm_teach:event_loop_lag_seconds")
    _, total = buckets[-1]
    return held, min(bound for bound, count in buckets if count >= 0.99 * total)


def _not_rightly_refused(plan: LoadPlan, refused: list[RequestRecord]) -> list[int]:
    """Return the indices of refusals that are not OpenAI's: 404 for an unknown model, 400 for what is malformed."""
    kinds = {each.index: each.malformed for each in plan.requests() if each.malformed is not None}
    right = {
        index: "http 404 invalid_request_error"
        if malformed_way(kind) == "an unknown model"
        else "http 400 invalid_request_error"
        for index, kind in kinds.items()
    }
    return [record.index for record in refused if record.error != right[record.index]]


def _unlike_offline(model: str, plan: LoadPlan, served: list[RequestRecord], progress: bool) -> list[int]:
    """Return the indices of the answers, whole or aborted, that the offline engine gives another text for."""
    llm = LLM(model, dtype="float32")
    source = PromptSource(asyncio.run(load_text_ids(LocalCodec(load_tokenizer(resolve_model(model))))), plan.seed)
    prompts = [source.ids(record.index, record.planned_prompt_len) for record in served]
    params = [SamplingParams(temperature=0, max_tokens=record.planned_output_len, ignore_eos=True) for record in served]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=progress)]
    return [record.index for record, text in zip(served, texts, strict=True) if not _agrees(record, text)]


def _agrees(record: RequestRecord, text: str) -> bool:
    return record.text == text if record.outcome == ANSWERED else text.startswith(record.text or "")


def main() -> int:
    """Run it as the arguments say; return 0 if it passed."""
    parser = argparse.ArgumentParser(prog="serving_soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=5000, help="(default: 5000)")
    parser.add_argument("--clients", type=int, default=500, help="at once (default: 500)")
    arguments = parser.parse_args()
    report = run_soak(arguments.model, arguments.requests, arguments.clients)
    print(report)
    return 0 if report.passed() else 1


if __name__ == "__main__":
    sys.exit(main())
