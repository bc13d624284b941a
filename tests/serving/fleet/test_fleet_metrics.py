"""`/metrics` of a fleet: what all replicas say, each name once, or an error."""

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.fleet.fleet_metrics import answer_for_all
from vllm_teach.serving.http.app import create_app
from vllm_teach.serving.metrics.server_metrics import ServerMetrics


@pytest.fixture
def replicas():
    replicas = [ServerMetrics("tiny", registry=CollectorRegistry(), engine=name) for name in ("one", "two")]
    replicas[0].on_error("unauthorized")
    replicas[1].on_error("unauthorized")
    replicas[1].on_error("unauthorized")
    replicas[1].on_event_loop_lag(0.003)
    return replicas


def samples(text):
    """By name and labels, but for those of this very request."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("http_requests")
    }


def ask(gather, metrics):
    app = create_app(AsyncLLMEngine.spawn("tiny"), metrics=metrics)
    answer_for_all(app, gather)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def get():
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            return await client.get("/metrics")

    return get()


def test_all_replicas_are_told_apart_by_a_label(replicas, run_async):
    async def gather():
        return [list(each.registry.collect()) for each in replicas]

    response = run_async(ask(gather, replicas[0]))
    assert response.status_code == 200
    families = list(text_string_to_metric_families(response.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    told = samples(response.text)
    for each in replicas:
        assert samples(each.render()[0].decode()).items() - told.items() == set()
    assert {family.name: family.type for family in families}["vllm_teach:event_loop_lag_seconds"] == "histogram"


def test_a_replica_that_does_not_answer_is_not_left_out(replicas, run_async):
    async def gather():
        raise TimeoutError

    response = run_async(ask(gather, replicas[0]))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "metrics_unavailable"
    assert "TimeoutError" in response.json()["error"]["message"]
