"""The dashboard asks for nothing that the server does not export, and Prometheus' configuration finds the server."""

import json
import re
from collections import defaultdict

import pytest
import yaml

from vllm_teach.engine.outputs import RequestMetrics
from vllm_teach.kvcache.usage import CacheUsage
from vllm_teach.resources import folder
from vllm_teach.serving.async_engine.messages import CompletionDelta, EngineReady, RequestDelta
from vllm_teach.serving.metrics.server_metrics import ServerMetrics, describe_metrics
from vllm_teach.serving.metrics.step_report import StepReport

MONITORING = folder("data") / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana_dashboard.json").read_text(encoding="utf-8"))
FUNCTIONS = {"rate", "sum", "max", "changes", "histogram_quantile", "label_values"}
TOKEN = re.compile(
    r"""(?P<string>"[^"]*") | (?P<range>\[[^\]]*\]) | (?P<number>\d[\d.]*) | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
        | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/(){},=<>]) | (?P<space>\s+)""",
    re.VERBOSE,
)


def tokens(query: str) -> list[tuple[str, str]]:
    """Split a PromQL query; a character that belongs nowhere is an error."""
    found, position = [], 0
    while position < len(query):
        match = TOKEN.match(query, position)
        assert match, f"no PromQL at {query[position:]!r}"
        found += [(match.lastgroup, match.group())] if match.lastgroup != "space" else []
        position = match.end()
    return found


def selectors(query: str) -> tuple[list[tuple[str, list[tuple[str, str]]]], set[str]]:
    """Return each metric of a query with its (label, value) matchers, and the labels that it is grouped by."""
    assert query.count("(") == query.count(")")
    parts, metrics, grouped, index = tokens(query), [], set(), 0
    while index < len(parts):
        kind, text = parts[index]
        index += 1
        if kind != "name" or text in FUNCTIONS:
            continue
        if text == "by":
            end = parts.index(("sign", ")"), index)
            grouped |= {name for kind, name in parts[index + 1 : end] if kind == "name"}
            index = end + 1
            continue
        matchers = []
        if index < len(parts) and parts[index] == ("sign", "{"):
            end = parts.index(("sign", "}"), index)
            inside = parts[index + 1 : end]
            matchers = [(inside[at][1], inside[at + 2][1].strip('"')) for at in range(0, len(inside), 4)]
            index = end + 1
        metrics.append((text, matchers))
    return metrics, grouped


def queries() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    annotations = [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    return targets + annotations


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """Every series of a server that has seen something of each kind: its labels with their values."""
    metrics = ServerMetrics("tiny")
    metrics.on_ready(EngineReady("tiny", 512, 2048, "float32", "cpu", 10, 16))
    usage = CacheUsage(10, 1, 2, 7, 5, 16, 0.5, 0.0, 4, 0, 20, 8, 0, 0, 0, 0, 0)
    metrics.on_report(StepReport(1, 0.1, 5, 0, 1, 0, 0, usage, attention_calls={"sdpa": 4}, device_memory=(1, 2)))
    times = RequestMetrics(0.0, 1.0, [2.0, 3.0], 4.0)
    metrics.on_finished(RequestDelta("a", (CompletionDelta(0, finish_reason="stop"),), True, metrics=times))
    for route in ("/health", "/metrics"):
        metrics.on_response("GET", route, 200)
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label, value in {"instance": "", **sample.labels}.items():  # Prometheus adds the server's address
                found[sample.name][label].add(value)
    return found


@pytest.mark.parametrize("query", queries())
def test_each_query_names_a_metric_with_labels_that_it_has(query: str, exported) -> None:
    metrics, grouped = selectors(query)
    assert metrics
    for name, matchers in metrics:
        assert name in exported
        for label, value in matchers:
            assert label in exported[name]
            assert value.startswith("$") or set(value.split("|")) <= exported[name][label]
        assert grouped <= set(exported[name])
    assert ("histogram_quantile" in query) == any(name.endswith("_bucket") for name, _ in metrics)
    # A rate of what goes down is none, and the height of what only grows says nothing.
    counting = [name.endswith(("_total", "_bucket", "_sum", "_count")) for name, _ in metrics]
    assert all(counting) if "rate(" in query or "changes(" in query else not any(counting)


@pytest.mark.parametrize(
    "query",
    [
        "sum(vllm:no_such_metric)",
        'sum(rate(vllm:request_success_total{finished_reason="ended"}[1m]))',
        "sum by (modus) (rate(vllm_teach:preemptions_total[1m]))",
        'sum(rate(http_requests_total{handler!~"/health|/no_such_route"}[1m]))',
        'vllm:num_requests_running{node="1"}',
        "rate(vllm:num_requests_running[1m])",
        "sum(vllm:prompt_tokens_total)",
    ],
)
def test_a_wrong_query_would_be_seen(query: str, exported) -> None:
    with pytest.raises(AssertionError):
        test_each_query_names_a_metric_with_labels_that_it_has(query, exported)


def test_the_dashboard_shows_all_that_the_articles_watch() -> None:
    shown = {name for query in queries() for name, _ in selectors(query)[0]}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    unseen = {each.name for each in describe_metrics()} - families
    assert unseen == {
        "vllm:cache_config_info",
        "vllm_teach:engine_info",
        "vllm:num_preemptions_total",  # shown by mode
        "vllm:request_inference_time_seconds",  # prefill and decode are shown
        "vllm:request_time_per_output_token_seconds",  # the time between tokens is
        "vllm_teach:attention_time_share",  # computed from the totals
        "vllm_teach:computed_prompt_tokens_total",
    }


def test_what_is_told_of_one_engine_is_not_the_sum_over_a_fleets() -> None:
    """Which is one instance, through whichever proxy it is asked."""
    [query] = [each for each in queries() if "_per_device" in each]
    assert selectors(query)[1] == {"instance", "engine"}


def test_answers_to_probes_are_not_counted_as_answers() -> None:
    """A load balancer and Prometheus would be most of an idle server's."""
    [query] = [each for each in queries() if "http_requests_total" in each]
    [(_, matchers)] = selectors(query)[0]
    assert 'handler!~"' in query
    assert set(dict(matchers)["handler"].split("|")) == {"/health", "/metrics"}


def test_panels_lie_beside_one_another_with_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells
    names = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == names


def test_each_variable_reads_a_label_that_there_is(exported) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["definition"]).groups()
            assert label in exported[metric]
            assert variable["name"] == label


def test_prometheus_reads_the_servers_own_path_and_port() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
