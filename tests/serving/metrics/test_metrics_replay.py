"""The metrics of a real run against what its event log says, read anew here: the log is the only witness."""

from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from vllm_teach import LLM, SamplingParams
from vllm_teach.engine import model_runner
from vllm_teach.serving.async_engine.messages import CompletionDelta, RequestDelta
from vllm_teach.serving.metrics.server_metrics import ServerMetrics, describe_metrics
from vllm_teach.serving.metrics.step_reporter import StepReporter

BLOCK, LAYERS = 4, 4
# Powers of two, so that sums of them are exact in any order.
ATTENTION, OTHER, BETWEEN = 1 / 64, 1 / 32, 1 / 4


class Clock:
    """Time passes in a forward pass and between steps, and nowhere else."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock, attend = Clock(), model_runner._PagedAttend.__call__

    def slow_attend(self, *arguments, **options):
        clock.now += ATTENTION
        return attend(self, *arguments, **options)

    monkeypatch.setattr(model_runner._PagedAttend, "__call__", slow_attend)
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


class Run:
    """An engine whose every step is reported, and its requests as they end."""

    def __init__(self, clock: Clock, **limits) -> None:
        self.clock = clock
        limits = {"block_size": BLOCK, "num_kv_blocks": 24, "attention_backend": "sdpa", "watermark": 0.0, **limits}
        self.engine = LLM("tiny", dtype="float32", max_model_len=90, **limits).engine
        self.engine.events.clock = clock
        self.engine.runner.model.register_forward_pre_hook(self._pass_time)
        self.reporter = StepReporter(self.engine, clock=clock)

    def _pass_time(self, *ignored) -> None:
        self.clock.now += OTHER

    def add(self, prompt, **params) -> str:
        return self.engine.add_request(list(prompt), SamplingParams(ignore_eos=True, **params))

    def abort(self, request_id: str) -> RequestDelta:
        request = self.engine.get_request(request_id)
        self.engine.abort(request)
        return last_delta(request.output())

    def steps(self, count: int = 10_000):
        """Yield the last deltas of what each step ended, until nothing is left to do."""
        while count and self.engine.has_unfinished_requests():
            self.clock.now += BETWEEN
            began, outputs = self.clock.now, self.engine.step()
            for output in outputs:
                self.reporter.latencies.add(output.metrics, began)
            yield [last_delta(output) for output in outputs if output.finished]
            count -= 1


def last_delta(output) -> RequestDelta:
    completions = tuple(CompletionDelta(each.index, finish_reason=each.finish_reason) for each in output.outputs)
    generated = sum(len(each.token_ids) for each in output.outputs)
    return RequestDelta(
        output.request_id,
        completions,
        finished=True,
        error=output.error,
        metrics=output.metrics,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_generation_tokens=generated,
    )


class Series:
    """What a scrape would give: values by name and labels. `read` collects the names that were asked for."""

    def __init__(self, metrics: ServerMetrics, read: set[str]) -> None:
        self.read = read
        self.values = {
            (sample.name, *(value for name, value in sorted(sample.labels.items()) if name not in USUAL)): sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        key = (key,) if isinstance(key, str) else key
        self.read.add(key[0])
        return self.values[key]

    def assert_histogram(self, name: str, values: list[float]) -> None:
        self.read.add(name)
        assert self[f"{name}_count"] == len(values), name
        assert self[f"{name}_sum"] == pytest.approx(sum(values), abs=1e-9), name
        bounds = [key[1] for key in self.values if key[0] == f"{name}_bucket"]
        assert len(bounds) > 5
        for bound in bounds:
            assert self[f"{name}_bucket", bound] == sum(value <= float(bound) for value in values), (name, bound)


USUAL = ("model_name", "engine")
HOST_BLOCKS = 8
LIMITS = {
    "swap": {"preemption_mode": "swap", "swap_space": HOST_BLOCKS * BLOCK * 4096 / 2**30},
    "recompute": {"enable_prefix_caching": False},
    "contiguous": {"kv_placement": "prefer_contiguous", "prefix_cache": "radix", "enable_prefix_caching": True},
}


def drive(run: Run):
    """Yield what each step ended: shared prompts, two answers to one, too many for the cache, aborts."""
    base = list(range(10, 34))
    run.add([*base, 40], max_tokens=9, temperature=0)
    yield from run.steps(3)
    for end in range(50, 54):
        run.add([*base, end, 7], max_tokens=20, seed=end)
    run.add(range(100, 118), n=2, max_tokens=16, seed=1)
    hasty = run.add(range(200, 220), max_tokens=5)
    yield [run.abort(hasty)]  # it has never been first in the queue
    late = run.add([*base, 60], max_tokens=30, seed=2)
    yield from run.steps(45)
    yield [run.abort(late)]
    yield from run.steps()


def check_moment(series: Series, log, run: Run, began: float) -> None:
    for state in ("running", "waiting", "swapped"):
        assert series[f"vllm:num_requests_{state}"] == log.number(state)
    held, blocks = log.held(), run.engine.kv.num_blocks
    assert series["vllm_teach:kv_cache_blocks", "held"] == len(held)
    assert series["vllm:kv_cache_usage_perc"] == len(held) / blocks
    assert series["vllm_teach:kv_cache_blocks", "idle"] + series["vllm_teach:kv_cache_blocks", "free"] == blocks - len(
        held
    )
    stored = sum(held.values())
    internal = 1 - stored / (BLOCK * len(held)) if held else 0
    assert series["vllm_teach:kv_cache_fragmentation_ratio", "internal"] == pytest.approx(internal)
    assert series["vllm:cpu_cache_usage_perc"] == sum(log.on_host.values()) / max(1, run.engine.kv.num_host_blocks)
    recent = sum(moment > log.now - 10 for moment in log.generated)
    assert series["vllm_tokens_per_sec"] == pytest.approx(recent / min(10, log.now - began))
    assert series["vllm_teach:tokens_per_second_per_device"] == series["vllm_tokens_per_sec"]
    check_token_latencies(series, log)
    if not log.caching:  # else some that nobody holds are not free, and the log does not say which
        free = [block for block in range(blocks) if block not in held]
        runs = "".join("." if block in free else "x" for block in range(blocks)).split("x")
        external = 1 - max(map(len, runs)) / len(free) if free else 0
        assert series["vllm_teach:kv_cache_fragmentation_ratio", "external"] == pytest.approx(external)


def check_token_latencies(series: Series, *logs) -> None:
    """Of every token there was, also of requests that still run."""
    firsts = [times[0] - log.arrived[seq][0] for log in logs for seq, times in log.token_times.items()]
    series.assert_histogram("vllm:time_to_first_token_seconds", firsts)
    gaps = [b - a for log in logs for times in log.token_times.values() for a, b in pairwise(times)]
    series.assert_histogram("vllm:inter_token_latency_seconds", gaps)


def check_totals(series: Series, *logs) -> None:
    """Counters and histograms: the sums over the logs of all engines that the server has had."""

    def total(name: str) -> int:
        return sum(log.counts[name] for log in logs)

    assert series["vllm:num_preemptions_total"] == total("recompute") + total("swap")
    for mode in ("recompute", "swap"):
        assert series["vllm_teach:preemptions_total", mode] == total(mode)
    for operation in ("swap_out", "swap_in", "copy", "move", "evict"):
        assert series["vllm_teach:kv_cache_block_operations_total", operation] == total(operation)
    assert series["vllm:prefix_cache_hits_total"] == total("hits")
    looked_up = sum(log.arrived[seq][1] for log in logs for seq in log.looked_up & set(log.arrived))
    assert series["vllm:prefix_cache_queries_total"] == looked_up
    assert series["vllm:prompt_tokens_total"] == total("prompt_tokens")
    assert series["vllm:generation_tokens_total"] == sum(len(log.generated) for log in logs)
    steps = [step for log in logs for step in log.steps]
    assert series["vllm_teach:computed_prompt_tokens_total"] == sum(prefill for prefill, _, _ in steps)
    series.assert_histogram("vllm:iteration_tokens_total", [prefill + decode for prefill, decode, _ in steps])
    series.assert_histogram("vllm_teach:step_seconds", [seconds for _, _, seconds in steps])
    passes = sum(prefill + decode > 0 for prefill, decode, _ in steps)
    assert series["vllm_teach:attention_calls_total", "sdpa"] == passes * LAYERS
    assert series["vllm_teach:attention_seconds_total"] == passes * LAYERS * ATTENTION
    assert series["vllm_teach:forward_seconds_total"] == passes * (LAYERS * ATTENTION + OTHER)
    assert series["vllm_teach:attention_time_share"] == LAYERS * ATTENTION / (LAYERS * ATTENTION + OTHER)
    assert series["vllm_teach:engine_starts_total"] == len(logs)


def check_requests(series: Series, *logs) -> None:
    def of_all(read, *reasons: str) -> list[float]:
        return [value for log in logs for seq in log.whole(*reasons) for value in read(log, seq)]

    for reason in ("stop", "length", "abort", "error"):
        assert series["vllm:request_success_total", reason] == len(of_all(lambda log, seq: [1], reason))
    series.assert_histogram(
        "vllm:request_queue_time_seconds",
        of_all(
            lambda log, seq: [log.admitted[seq] - log.arrived[seq][0]] if seq in log.admitted else [], "length", "abort"
        ),
    )
    spans = {
        "vllm:e2e_request_latency_seconds": lambda log, seq: log.ended[seq][0] - log.arrived[seq][0],
        "vllm:request_prefill_time_seconds": lambda log, seq: log.token_times[seq][0] - log.admitted[seq],
        "vllm:request_decode_time_seconds": lambda log, seq: log.token_times[seq][-1] - log.token_times[seq][0],
        "vllm:request_inference_time_seconds": lambda log, seq: log.token_times[seq][-1] - log.admitted[seq],
        "vllm:request_prompt_tokens": lambda log, seq: log.arrived[seq][1],
        "vllm:request_generation_tokens": lambda log, seq: log.answered(seq),
        "vllm:request_time_per_output_token_seconds": lambda log, seq: (
            (log.token_times[seq][-1] - log.token_times[seq][0]) / (log.answered(seq) - 1)
        ),
    }
    for name, span in spans.items():
        series.assert_histogram(name, of_all(lambda log, seq, span=span: [span(log, seq)], "length"))


@pytest.mark.parametrize("kind", LIMITS)
def test_every_metric_is_what_the_event_log_says(kind: str, clock: Clock, read_log) -> None:
    run, read = Run(clock, **LIMITS[kind]), set()
    metrics, began = ServerMetrics("tiny", registry=CollectorRegistry(), clock=clock), clock.now
    metrics.on_report(run.reporter.report())
    for ended in drive(run):
        metrics.on_report(run.reporter.report())
        for delta in ended:
            metrics.on_finished(delta)
        check_moment(Series(metrics, read), read_log(run.engine, clock.now), run, began)
    log = read_log(run.engine, clock.now)
    check_totals(Series(metrics, read), log)
    check_requests(Series(metrics, read), log)
    for happened in ("recompute", *{"swap": ("swap", "hits", "evict"), "recompute": (), "contiguous": ("hits",)}[kind]):
        assert log.counts[happened], f"the run had no {happened}"
    assert {reason for _, reason in log.ended.values()} == {"length", "abort"}
    unread = {each.name for each in describe_metrics()} - read
    assert unread == {
        "http_requests_total",
        "vllm:cache_config_info",
        "vllm_mem_usage",
        "vllm_teach:engine_info",
        "vllm_teach:engine_memory_bytes",
        "vllm_teach:engine_up",
        "vllm_teach:event_loop_lag_seconds",
        "vllm_teach:out_of_memory_total",
        "vllm_teach:request_errors_total",
    }


def test_reports_may_be_few_and_engines_may_be_replaced(clock: Clock, read_log) -> None:
    metrics, logs = ServerMetrics("tiny", registry=CollectorRegistry(), clock=clock), []
    for kind in ("swap", "recompute", "swap"):
        run = Run(clock, **LIMITS[kind])
        metrics.on_report(run.reporter.report())
        for index, ended in enumerate(drive(run)):
            if index % 7 == 0:
                metrics.on_report(run.reporter.report())
            for delta in ended:
                metrics.on_finished(delta)
        metrics.on_report(run.reporter.report())
        logs.append(read_log(run.engine, clock.now))
    check_totals(Series(metrics, set()), *logs)
    check_token_latencies(Series(metrics, set()), *logs)
    check_requests(Series(metrics, set()), *logs)
