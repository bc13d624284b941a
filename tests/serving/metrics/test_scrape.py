"""The page that Prometheus reads, read."""

import math

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.metrics.scrape import read_scrape
from vllm_teach.serving.metrics.server_metrics import ServerMetrics

PAGE = """\
# TYPE answers_total counter
answers_total{status="200",route="a"} 3
answers_total{status="200",route="b"} 4
answers_total{status="500",route="a"} 1
# TYPE wait histogram
wait_bucket{le="0.5"} 2
wait_bucket{le="10.0"} 5
wait_bucket{le="+Inf"} 6
wait_bucket{le="2.0"} 4
wait_count 6
wait_sum 30.5
# TYPE share gauge
share NaN
"""


def test_samples_by_name_and_label() -> None:
    page = read_scrape(PAGE, 12.0)
    assert page.moment == 12.0
    assert page.value("answers_total") == 8
    assert page.value("answers_total", status="200") == 7
    assert page.value("answers_total", status="200", route="b") == 4
    assert page.by_label("answers_total", "status") == {"200": 7, "500": 1}
    assert page.by_label("answers_total", "colour") == {}


def test_buckets_come_in_the_order_of_their_bounds() -> None:
    assert read_scrape(PAGE).buckets("wait") == [(0.5, 2), (2.0, 4), (10.0, 5), (math.inf, 6)]


@pytest.mark.parametrize(
    ("name", "labels"), [("anwsers_total", {}), ("answers_total", {"status": "404"}), ("share", {})]
)
def test_what_is_not_there_is_no_zero(name, labels) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        read_scrape(PAGE).value(name, **labels)


def test_our_own_page() -> None:
    metrics = ServerMetrics("tiny")
    metrics.on_response("GET", "/health", 200)
    page = read_scrape(metrics.render()[0].decode())
    assert page.value("http_requests_total", status="200", model_name="tiny") == 1
    assert page.buckets("vllm:e2e_request_latency_seconds")[-1] == (math.inf, 0)
