"""`bench serve` from end to end against the small server: what it asks, prints, writes, and does at Ctrl-C."""

import asyncio
import json
import os
import signal
import threading
import time
from typing import Any

import pytest

from vllm_teach import cli, data
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import ALPACA
from vllm_teach.performance.load_test.arrivals import ClosedLoop, OpenLoop
from vllm_teach.performance.load_test.bench import ServeBench, ServeBenchOptions
from vllm_teach.performance.load_test.loop_watch import INTERVAL, ROUNDING, LoopWatch
from vllm_teach.performance.load_test.plan import LoadPlan
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.report import LoadReport, format_load
from vllm_teach.performance.load_test.tally import LoadTally, Slo
from vllm_teach.performance.load_test.target import ServerError, Target


def bench(server: Any, plan: LoadPlan, **options: Any) -> LoadReport:
    return asyncio.run(ServeBench(Target(server.url), plan, ServeBenchOptions(**options)).run())


def test_prompts_are_as_long_as_planned_by_the_servers_own_tokenizer(server: Any) -> None:
    plan = LoadPlan(ClosedLoop(4), 25, ALPACA, seed=2)
    report = bench(server, plan)
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in server.seen]
    assert sorted(lengths) == sorted(ALPACA.draw(25, 2))
    assert report.tally.prompt_tokens == report.tally.planned_prompt == sum(prompt for prompt, _ in lengths)
    assert report.tally.output_tokens == sum(output for _, output in lengths)


def test_a_chat_sends_text_of_exact_lengths(server: Any) -> None:
    report = bench(server, LoadPlan(num_requests=10, lengths=(33, 2), warm_up=2), chat=True)
    assert len(server.seen) == 12
    texts = [body["messages"][0]["content"] for body in server.seen]
    assert {len(text.split()) for text in texts} == {33}
    assert len(set(texts)) == 12
    assert "the chat template adds" in report.prompts


def test_the_models_context_bounds_the_mix(server: Any) -> None:
    server.max_model_len = 64
    bench(server, LoadPlan(num_requests=30, lengths=ALPACA))
    assert max(len(body["prompt"]) + body["max_tokens"] for body in server.seen) == 64
    with pytest.raises(InvalidArgumentError, match="do not fit into 64"):
        bench(server, LoadPlan(lengths=(60, 5)))


def test_a_tokenizer_of_this_machine_needs_none_of_the_server(server: Any) -> None:
    server.lends_tokenizer = False
    with pytest.raises(ServerError, match="name the model's"):
        bench(server, LoadPlan(num_requests=1))
    arguments = ["--base-url", server.url, "--requests", "3", "--input-len", "9", "--output-len", "2", "--quiet"]
    assert cli.main(["bench", "serve", *arguments, "--tokenizer", str(data.path("tiny-llama"))]) == 0
    assert [len(body["prompt"]) for body in server.seen] == [9, 9, 9]


def test_what_the_server_says_of_itself_is_checked_before_anything_is_sent(server: Any) -> None:
    with pytest.raises(ServerError, match="model='other' is not served there: choose one of fake"):
        bench(server, LoadPlan(), model="other")
    for odd in ({"data": 5}, {"data": {"id": "x"}}, 3):
        server.listing = odd
        with pytest.raises(ServerError, match="lists no model"):
            bench(server, LoadPlan())
    server.listing = None
    server.models = ()
    with pytest.raises(ServerError, match="lists no model"):
        bench(server, LoadPlan())
    with pytest.raises(ServerError, match="does not answer /v1/models"):
        asyncio.run(ServeBench(Target("http://127.0.0.1:9/v1"), LoadPlan()).run())
    assert not server.seen


def test_who_is_no_such_server_is_told_from_one_that_fails(server: Any) -> None:
    elsewhere = Target(f"{server.url}/some/page")
    with pytest.raises(
        ServerError, match=r"/v1/models with status 404 .*: see that an OpenAI-compatible server is there"
    ):
        asyncio.run(ServeBench(elsewhere, LoadPlan()).run())
    server.listing = {"name": "another service"}
    with pytest.raises(ServerError, match="lists no model: name one, or see that an OpenAI-compatible server is there"):
        bench(server, LoadPlan())
    server.listing, server.lends_tokenizer = None, False
    with pytest.raises(ServerError, match=r"/tokenize with status 404 .*: see its log"):
        bench(server, LoadPlan())


def test_nonsense_is_refused() -> None:
    for url in ("127.0.0.1:8000", "ftp://x", "http://user:secret@127.0.0.1", ""):
        with pytest.raises(InvalidArgumentError, match="is no address"):
            Target(url)
    with pytest.raises(InvalidArgumentError, match="only a stream shows"):
        ServeBenchOptions(stream=False, slo=Slo(ttft=1.0))
    with pytest.raises(InvalidArgumentError, match="timeout=0"):
        ServeBenchOptions(timeout=0)
    with pytest.raises(InvalidArgumentError, match="no figures"):
        ServeBench(Target(), LoadPlan()).report()


def test_the_address_may_end_in_v1() -> None:
    assert {Target(f"http://h:1{end}").root for end in ("", "/", "/v1", "/v1/")} == {"http://h:1"}


def test_the_command_prints_the_table_and_writes_figures_and_records(server: Any, tmp_path: Any, capsys: Any) -> None:
    figures, records = tmp_path / "figures.json", tmp_path / "records.jsonl"
    arguments = [
        "--base-url", server.url + "/v1", "--api-key", "secret", "--requests", "40", "--concurrency", "4",
        "--input-len", "6", "--output-len", "4", "--malformed-share", "0.2", "--slo-ttft", "60000", "--seed", "5",
        "--shared-prefix", "3", "--extra-body", '{"top_p": 0.5}', "--quiet", "--record-text",
        "--json", str(figures), "--records", str(records),
    ]  # fmt: skip
    assert cli.main(["bench", "serve", *arguments]) == 0
    printed = capsys.readouterr().out
    written = json.loads(figures.read_text())
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    answered = written["outcomes"]["answered"]
    assert sorted(line["index"] for line in lines) == list(range(40))
    assert len(server.seen) == answered == sum(line["outcome"] == "answered" for line in lines)
    assert written["outcomes"] == {"answered": answered, "aborted": 0, "refused": 40 - answered, "failed": 0}
    assert written["refusals"] == {"http 400 invalid_request_error": 40 - answered}
    assert {line["text"] for line in lines if line["outcome"] == "answered"} == {"xxxx"}
    assert written["latencies"]["itl"]["count"] == 3 * answered
    assert (written["good"], written["judged"]) == (answered, answered)
    assert written["tokens_from"] == {"usage": answered}
    assert written["server"]["base_url"] == server.url + "/v1"
    assert written["environment"]["cores"] == os.cpu_count()
    assert "--api-key '***'" in written["command"]
    assert "secret" not in figures.read_text() + records.read_text() + printed
    assert set(server.keys) == {"Bearer secret"}
    assert all(body["top_p"] == 0.5 for body in server.seen)
    assert len({tuple(body["prompt"][:3]) for body in server.seen}) == 1
    assert f"  answered  {answered:>9,}" in printed
    assert f"{40 - answered:>21,} x http 400 invalid_request_error" in printed
    assert "goodput: " in printed
    assert "ITL is from one token to the next; an event carried 1.00 tokens" in printed


def watched(stall: int, cpu: float) -> LoadReport:
    """A report of one answer after 100 ms, by a client that stalls for so many intervals again and again."""
    tally, watch = LoadTally(), LoopWatch()
    tally.add(RequestRecord(0, 1, 1, outcome="answered", end=0.1, first=0.1, last=0.1, output_tokens=1))
    watch.start(0.0, 0.0)
    for tick in range(0, 200, stall):
        now = tick * INTERVAL + ROUNDING
        watch.note(now, cpu * now)
    return LoadReport(tally, watch, "headline", "prompts", {}, {})


def test_the_table_says_when_the_client_was_the_bottleneck() -> None:
    fine, full, starved = watched(1, 0.5), watched(1, 0.95), watched(10, 0.3)
    assert fine.client_share == pytest.approx(0, abs=1e-9)
    assert "BOTTLENECK" not in format_load(fine)
    assert "BOTTLENECK (its core is full)" in format_load(full)
    assert starved.client_share == pytest.approx(4.5 * INTERVAL / 0.1)  # 0 to 9 intervals late
    assert "BOTTLENECK (others used its core, too): its mean delay is 22% of the median TTFT" in format_load(starved)
    assert starved.to_json()["client_was_bottleneck"] is True


def test_the_table_says_that_gaps_are_between_events_where_these_carried_several_tokens() -> None:
    tally = LoadTally()
    record = RequestRecord(0, 1, 6, outcome="answered", end=0.3, first=0.1, last=0.3, output_tokens=6, events=3)
    record.gaps.extend([0.1, 0.1])
    tally.add(record)
    text = format_load(LoadReport(tally, LoopWatch(), "headline", "prompts", {}, {}))
    assert "ITL is from one event with text to the next; an event carried 2.00 tokens" in text


def test_a_test_in_which_nothing_is_answered_has_no_table_of_latencies(server: Any) -> None:
    text = format_load(bench(server, LoadPlan(num_requests=3), extra={"behave": "busy"}, slo=Slo(ttft=1.0)))
    assert f"{3:>21,} x http 429 rate_limit_error" in text
    assert "the first: no\n" in text
    assert "p99 " not in text.split("this client")[0]
    assert "0 of 3 (0.0%)" in text


def test_an_open_loop_that_is_held_back_says_so(server: Any) -> None:
    plan = LoadPlan(OpenLoop(500, "fixed", max_in_flight=1), 10, (3, 1))
    report = bench(server, plan, extra={"behave": "in turn"})
    assert report.held_back > 0
    assert f"{report.held_back:,} waited for a place" in format_load(report)


def interrupt_when(condition: Any) -> threading.Thread:
    """Press Ctrl-C once, when `condition` holds."""

    def press() -> None:
        limit = time.monotonic() + 10
        while not condition() and time.monotonic() < limit:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_ctrl_c_prints_and_writes_what_there_is(server: Any, tmp_path: Any, capsys: Any) -> None:
    figures, records = tmp_path / "figures.json", tmp_path / "records.jsonl"
    arguments = [
        "--base-url", server.url, "--requests", "100000", "--concurrency", "4", "--input-len", "3",
        "--output-len", "5", "--extra-body", '{"behave": "slow"}', "--quiet", "--json", str(figures),
        "--records", str(records),
    ]  # fmt: skip
    pressing = interrupt_when(lambda: len(server.seen) >= 12)
    status = cli.main(["bench", "serve", *arguments])
    pressing.join()
    assert status == 130
    printed = capsys.readouterr()
    written = json.loads(figures.read_text())
    assert written["interrupted"] is True
    assert written["outcomes"]["answered"] == len(records.read_text().splitlines()) >= 8
    assert f"INTERRUPTED: what had ended by then; {written['unfinished']:,} more were in flight" in printed.out
    assert f"  answered  {written['outcomes']['answered']:>9,}" in printed.out
    assert "interrupted" in printed.err


def test_ctrl_c_before_the_first_request_shows_no_figures(server: Any, capsys: Any) -> None:
    arguments = ["--base-url", server.url, "--warm-up", "3", "--extra-body", '{"behave": "hang"}', "--quiet"]
    pressing = interrupt_when(lambda: server.open >= 3)
    assert cli.main(["bench", "serve", *arguments]) == 130
    pressing.join()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--burst", "2"], "burst belong to an open loop: give --rate, too."),
        (["--mix", "alpaca", "--input-len", "5"], "--mix alpaca draws the lengths"),
        (["--extra-body", "[1]"], "--extra-body is '[1]'"),
        (["--extra-body", "{"], "--extra-body is '{'"),
        (["--base-url", "nowhere"], "base_url='nowhere'"),
        (["--rate", "0"], "rate=0.0"),
        (["--slo-ttft", "0"], "ttft=0.0"),
        (["--records", "no/such/folder/x"], "--records is 'no/such/folder/x'"),
        (["--json", "no/such/folder/x"], "--json is 'no/such/folder/x'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], complaint: str, capsys: Any) -> None:
    assert cli.main(["bench", "serve", "--quiet", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err
    assert len(printed.err.splitlines()) == 1


def test_the_listener_hears_each_request_once(server: Any) -> None:
    heard: list[RequestRecord] = []
    plan = LoadPlan(num_requests=7, lengths=(3, 2), warm_up=2)
    asyncio.run(ServeBench(Target(server.url), plan, on_record=heard.append).run())
    assert sorted(record.index for record in heard) == list(range(7))
