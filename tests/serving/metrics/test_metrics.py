"""Each of the server's hooks, and the text that Prometheus gets. What a run's figures are is in test_metrics_replay."""

import pickle
from dataclasses import replace

import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from vllm_teach import errors
from vllm_teach.engine.bucket_counts import BucketCounts
from vllm_teach.engine.outputs import RequestMetrics
from vllm_teach.engine.step_totals import TOKEN_BOUNDS
from vllm_teach.kvcache.usage import CacheUsage
from vllm_teach.serving.async_engine.messages import CompletionDelta, EngineReady, RequestDelta
from vllm_teach.serving.metrics.request_metrics import ERROR_KINDS, finish_reason
from vllm_teach.serving.metrics.server_metrics import ServerMetrics, describe_metrics
from vllm_teach.serving.metrics.step_report import StepReport

USAGE = CacheUsage(10, 1, 2, 7, 5, 16, 0.5, 0.0, 4, 1, 20, 8, 6, 5, 4, 3, 2)
UNUSED = replace(USAGE, hit_queries=0, hit_tokens=0, swapped_out=0, swapped_in=0, copies=0, moves=0, evictions=0)


def report(engine_id: str = "first", **figures) -> StepReport:
    first = {
        "step": 1,
        "seconds": 0.1,
        "prefill_tokens": 5,
        "decode_tokens": 0,
        "running": 1,
        "waiting": 0,
        "swapped": 0,
    }
    return StepReport(**{**first, "usage": USAGE, "engine_id": engine_id, **figures})


class Server(ServerMetrics):
    """Its metrics, and what a scrape reads of them."""

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        name, *labels = (key,) if isinstance(key, str) else key
        body, _ = self.render()
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                own = [value for label, value in sorted(sample.labels.items()) if label not in ("model_name", "engine")]
                if sample.name == name and own == labels:
                    return sample.value
        raise KeyError(key)


@pytest.fixture
def server() -> Server:
    return Server("tiny")


def test_a_scrape_is_prometheus_text_with_the_usual_labels(server: Server) -> None:
    server.on_report(report())
    body, content_type = server.render()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    for each in describe_metrics():
        family = families[each.name.removesuffix("_total") if each.kind == "counter" else each.name]
        assert (family.type, family.documentation) == (each.kind, each.text)
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    assert not any(name.endswith("_created") for name in families)


def test_every_metric_has_one_sentence_of_help() -> None:
    described = describe_metrics()
    assert len({each.name for each in described}) == len(described) > 35
    for each in described:
        assert each.text.endswith(".")
        assert "\n" not in each.text
        assert each.kind == "counter" or each.name == "vllm:iteration_tokens_total" or not each.name.endswith("_total")


def test_two_servers_in_one_process_do_not_count_for_each_other(server: Server) -> None:
    other = Server("tiny")
    other.on_error("unauthorized")
    assert other["vllm_teach:request_errors_total", "unauthorized"] == 1
    with pytest.raises(KeyError):
        server["vllm_teach:request_errors_total", "unauthorized"]


def test_a_registry_takes_one_server() -> None:
    registry = CollectorRegistry()
    ServerMetrics("tiny", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        ServerMetrics("tiny", registry=registry)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.OutOfMemoryError("x"), "out_of_memory"),
        (errors.EngineDeadError("x"), "engine_dead"),
        (errors.EngineError("x"), "request_failed"),
        (errors.QueueFullError("x"), "queue_full"),
        (errors.RequestTimeoutError("x"), "timeout"),
        (errors.PromptTooLongError("x"), "prompt_too_long"),
        (errors.InvalidArgumentError("x"), "invalid_request"),
        (errors.MissingDependencyError("x"), "other"),
        ("body_too_large", "body_too_large"),
    ],
)
def test_errors_are_counted_by_kind(error, kind: str, server: Server) -> None:
    server.on_error(pickle.loads(pickle.dumps(error)))  # as it comes from the engine's process
    assert server["vllm_teach:request_errors_total", kind] == 1
    others = [known for _, known in ERROR_KINDS if known != kind]
    assert [server["vllm_teach:request_errors_total", known] for known in others] == [0] * len(others)


def test_a_request_that_failed_is_an_error_and_an_end(server: Server) -> None:
    server.on_finished(RequestDelta("a", finished=True, error=errors.OutOfMemoryError("x")))
    assert server["vllm:request_success_total", "error"] == 1
    assert server["vllm_teach:request_errors_total", "out_of_memory"] == 1


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (RequestDelta("a", (CompletionDelta(0, finish_reason="stop"),)), "stop"),
        (RequestDelta("a", (CompletionDelta(0), CompletionDelta(1, finish_reason="length"))), "length"),
        (RequestDelta("a", (CompletionDelta(0, finish_reason="abort"),)), "abort"),
        (RequestDelta("a"), "abort"),
        (RequestDelta("a", (CompletionDelta(0, finish_reason="stop"),), error=errors.EngineError("x")), "error"),
    ],
)
def test_how_a_request_ended(delta: RequestDelta, reason: str) -> None:
    assert finish_reason(delta) == reason


def test_latencies_of_a_request(server: Server) -> None:
    times = RequestMetrics(10.0, 10.5, [12.0, 12.25, 13.25], 13.5)
    delta = RequestDelta(
        "a", (CompletionDelta(0, finish_reason="stop"),), metrics=times, num_prompt_tokens=7, num_generation_tokens=3
    )
    server.on_finished(delta)
    wanted = {
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:e2e_request_latency_seconds": 3.5,
        "vllm:request_prefill_time_seconds": 1.5,
        "vllm:request_decode_time_seconds": 1.25,
        "vllm:request_inference_time_seconds": 2.75,
        "vllm:request_time_per_output_token_seconds": 0.625,
        "vllm:request_prompt_tokens": 7,
        "vllm:request_generation_tokens": 3,
    }
    assert {name: server[f"{name}_sum"] for name in wanted} == wanted
    assert {name: server[f"{name}_count"] for name in wanted} == dict.fromkeys(wanted, 1)


def test_a_request_that_never_ran_has_no_latency(server: Server) -> None:
    server.on_finished(RequestDelta("a", (CompletionDelta(0, finish_reason="abort"),), metrics=RequestMetrics(10.0)))
    server.on_finished(RequestDelta("b", finished=True, error=errors.RequestTimeoutError("x")))
    assert server["vllm:request_queue_time_seconds_count"] == 0
    assert server["vllm:e2e_request_latency_seconds_count"] == 0
    assert server["vllm:request_success_total", "abort"] == 1


def test_counters_go_on_when_another_engine_takes_over(server: Server) -> None:
    tokens = BucketCounts(TOKEN_BOUNDS)
    tokens.add_all([3, 30])
    server.on_report(report(usage=UNUSED))
    figures = {"generation_tokens": 50, "preemptions": {"swap": 2}, "attention_calls": {"sdpa": 8}}
    server.on_report(report(**figures, step_tokens=tokens.read()))
    server.on_report(report(**figures, step_tokens=tokens.read()))  # nothing has come since
    # As many, or more: that the figures do not fall does not mean that it is the same engine.
    server.on_report(report("second", usage=UNUSED))
    server.on_report(report("second", **{**figures, "generation_tokens": 60}, step_tokens=tokens.read()))
    assert server["vllm:generation_tokens_total"] == 110
    assert server["vllm_teach:preemptions_total", "swap"] == 4
    assert server["vllm:num_preemptions_total"] == 4
    assert server["vllm_teach:attention_calls_total", "sdpa"] == 16
    assert server["vllm:prefix_cache_hits_total"] == 2 * USAGE.hit_tokens
    assert server["vllm_teach:kv_cache_block_operations_total", "swap_out"] == 2 * USAGE.swapped_out
    assert server["vllm:iteration_tokens_total_count"] == 4
    assert server["vllm:iteration_tokens_total_sum"] == 66
    assert server["vllm_teach:engine_starts_total"] == 2


def test_what_an_engine_did_before_its_first_report_is_not_counted() -> None:
    now = [100.0]
    server, tokens = Server("tiny", clock=lambda: now[0]), BucketCounts(TOKEN_BOUNDS)
    tokens.add_all([3, 30])
    before = {"generation_tokens": 50, "attention_calls": {"sdpa": 8}, "forward_seconds": 4.0, "attention_seconds": 3.0}
    server.on_report(report(**before, step_tokens=tokens.read()))
    tokens.add(5)
    now[0] = 101.0
    after = {"generation_tokens": 57, "attention_calls": {"sdpa": 9}, "forward_seconds": 6.0, "attention_seconds": 3.5}
    server.on_report(report(**after, step_tokens=tokens.read()))
    assert server["vllm:generation_tokens_total"] == 7
    assert server["vllm_tokens_per_sec"] == 7
    assert server["vllm_teach:attention_calls_total", "sdpa"] == 1
    assert server["vllm_teach:attention_time_share"] == 0.25
    assert server["vllm:iteration_tokens_total_count"] == 1
    assert server["vllm:iteration_tokens_total_sum"] == 5
    assert server["vllm:prefix_cache_hits_total"] == 0


def test_a_dead_engine_runs_nothing_until_another_reports(server: Server) -> None:
    server.on_report(report(running=3, waiting=2, swapped=1))
    assert server["vllm_teach:engine_up"] == 1
    server.on_finished(RequestDelta("a", finished=True, error=errors.EngineError("x")))
    assert server["vllm:num_requests_running"] == 3
    server.on_finished(RequestDelta("b", finished=True, error=errors.EngineDeadError("x")))
    queues = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped")
    assert [server[name] for name in (*queues, "vllm_teach:engine_up")] == [0, 0, 0, 0]
    server.on_report(report("second", running=4))
    assert [server[name] for name in (*queues, "vllm_teach:engine_up")] == [4, 0, 0, 1]
    server.on_error(errors.EngineDeadError("x"))
    assert server["vllm_teach:engine_up"] == 0


def test_the_rate_of_tokens_falls_to_zero_when_nothing_comes() -> None:
    now = [100.0]
    server = Server("tiny", clock=lambda: now[0])
    server.on_ready(EngineReady("tiny", 512, 2048, "float32", "cpu", 10, 16, num_devices=2))
    server.on_report(report())
    now[0] = 104.0
    server.on_report(report(generation_tokens=80))
    assert server["vllm_tokens_per_sec"] == 80 / 4  # the first seconds of its life
    assert server["vllm_teach:tokens_per_second_per_device"] == 80 / 4 / 2
    now[0] = 113.0
    assert server["vllm_tokens_per_sec"] == 8
    server.on_report(report("second"))
    server.on_report(report("second", generation_tokens=10))
    assert server["vllm_tokens_per_sec"] == 9
    now[0] = 114.5
    assert server["vllm_tokens_per_sec"] == 1
    now[0] = 200.0
    assert server["vllm_tokens_per_sec"] == 0


def test_the_share_of_attention_is_that_of_late_and_stays_while_nothing_runs() -> None:
    now = [100.0]
    server = Server("tiny", clock=lambda: now[0])
    server.on_report(report())
    server.on_report(report(forward_seconds=4.0, attention_seconds=1.0))
    assert server["vllm_teach:attention_time_share"] == 0.25
    now[0] = 120.0
    server.on_report(report(forward_seconds=6.0, attention_seconds=2.0))
    assert server["vllm_teach:attention_time_share"] == 0.5
    now[0] = 140.0
    server.on_report(report(forward_seconds=6.0, attention_seconds=2.0))
    assert server["vllm_teach:attention_time_share"] == 0.5


def test_memory_of_host_and_device_in_use(server: Server) -> None:
    server.on_report(report(memory_bytes=1000))
    assert 0 < server["vllm_mem_usage", "host"] < 1
    assert server["vllm_mem_usage", "host"] == pytest.approx(psutil.virtual_memory().percent / 100, abs=0.1)
    with pytest.raises(KeyError):
        server["vllm_mem_usage", "device"]
    server.on_report(report(memory_bytes=2000, device_memory=(30, 120)))
    assert server["vllm_mem_usage", "device"] == 0.25
    assert server["vllm_teach:engine_memory_bytes"] == 2000
    assert server["process_resident_memory_bytes"] > 1e6


def test_what_the_engine_is_stands_in_labels(server: Server) -> None:
    server.on_ready(EngineReady("tiny", 512, 2048, "float32", "cpu", 10, 16))
    assert server["vllm:cache_config_info", "16", "10"] == 1
    body, _ = server.render()
    (line,) = [line for line in body.decode().splitlines() if line.startswith("vllm_teach:engine_info{")]
    assert all(part in line for part in ('dtype="float32"', 'device="cpu"', 'max_model_len="512"'))


def test_answers_and_lag_are_counted(server: Server) -> None:
    for status in (200, 200, 429):
        server.on_response("POST", "/generate", status)
    for method in ("BREW", "WHEN"):  # a client's own words make no series
        server.on_response(method, "unknown", 405)
    server.on_event_loop_lag(0.0)
    server.on_event_loop_lag(0.3)
    body, _ = server.render()
    assert 'http_requests_total{engine="0",handler="/generate",method="POST",model_name="tiny",status="200"} 2.0' in (
        body.decode()
    )
    assert server["http_requests_total", "unknown", "other", "405"] == 2
    assert server["vllm_teach:event_loop_lag_seconds_bucket", "0.1"] == 1
    assert server["vllm_teach:event_loop_lag_seconds_count"] == 2
