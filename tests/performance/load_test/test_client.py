"""The load client against a small server that does as it is told: the outcomes, the times, the bounds."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_teach.performance.load_test.arrivals import ClosedLoop, OpenLoop
from vllm_teach.performance.load_test.client import LoadClient
from vllm_teach.performance.load_test.plan import Abort, LoadPlan, PlannedRequest
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.requests import RequestForm
from vllm_teach.performance.load_test.target import Target


def drive(
    url: str, plan: LoadPlan, *, behave: str | None = None, form: dict | None = None, **options: Any
) -> tuple[list[RequestRecord], LoadClient]:
    """Run `plan` with prompts of ids, and return the records in the order in which they ended."""
    records: list[RequestRecord] = []

    async def main() -> LoadClient:
        target = Target(url, options.pop("api_key", None))
        fields = {"extra": {} if behave is None else {"behave": behave}} | (form or {})
        async with target.session() as session:
            client = LoadClient(
                session,
                target,
                RequestForm("fake", **fields),
                plan,
                options.pop("prompt", lambda request: ([7] * request.prompt_len, request.prompt_len)),
                options.pop("on_record", records.append),
                **options,
            )
            await client.warm_up()
            await client.run()
            return client

    return records, asyncio.run(main())


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.005)


def test_a_closed_loop_answers_all_and_never_opens_more_than_it_may(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(ClosedLoop(4), 30, lengths=(9, 6)), behave="slow")
    assert sorted(record.index for record in records) == list(range(30))
    assert {record.outcome for record in records} == {"answered"}
    assert server.most == 4
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.seen] == [(9, 6)] * 30
    for record in records:
        assert (record.prompt_tokens, record.output_tokens, record.tokens_from, record.status) == (9, 6, "usage", 200)
        assert (record.events, len(record.gaps)) == (6, 5)
        assert record.first is not None
        assert record.last is not None
        assert record.due <= record.sent < record.first < record.last <= record.end
        assert record.tpot == pytest.approx(sum(record.gaps) / 5)
        assert record.e2e >= 6 * 0.0099  # the server slept six times


@pytest.mark.parametrize("chat", [False, True])
def test_whole_answers_have_no_times_within(server: Any, chat: bool) -> None:
    form = {"stream": False, "chat": chat}
    records, _ = drive(
        server.url, LoadPlan(num_requests=3, lengths=(5, 8)), form=form, prompt=lambda r: ("hello", 5), keep_text=True
    )
    assert [(r.outcome, r.output_tokens, r.text) for r in records] == [("answered", 8, "xxxxxxxx")] * 3
    assert all(r.ttft is r.tpot is None and not r.gaps for r in records)


def test_without_usage_tokens_are_counted_by_the_tokenizer_or_by_events(server: Any) -> None:
    plan = LoadPlan(num_requests=2, lengths=(5, 8))
    [record, _], _ = drive(server.url, plan, form={"usage": False})
    assert (record.output_tokens, record.tokens_from, record.prompt_tokens) == (8, "events", 5)
    [record, _], _ = drive(server.url, plan, form={"usage": False}, count_tokens=lambda text: len(text) // 2)
    assert (record.output_tokens, record.tokens_from, record.text) == (4, "tokenizer", None)


@pytest.mark.parametrize(
    ("behave", "error", "status"),
    [
        ("busy", "http 429 rate_limit_error", 429),
        ("html", "http 502 no error object", 502),
        ("redirect", "http 307", 307),
        ("cut", "cut stream", 200),
        ("half", "cut stream", 200),
        ("fail", "error in the stream: server_error", 200),
        ("hang up", "connection lost", None),
    ],
)
def test_failures_have_classes(server: Any, behave: str, error: str, status: int | None) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=3, lengths=(5, 4)), behave=behave)
    assert [(r.outcome, r.error, r.status) for r in records] == [("failed", error, status)] * 3
    assert len(server.seen) == 3, "nothing is sent twice"


@pytest.mark.parametrize("behave", ["cut at the end", "linger"])
def test_an_answer_whose_last_event_came_is_whole_whatever_becomes_of_its_connection(server: Any, behave: str) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=2, lengths=(5, 3)), behave=behave, timeout=1.0)
    assert [(r.outcome, r.error, r.output_tokens) for r in records] == [("answered", None, 3)] * 2
    assert all(r.e2e < 1.0 for r in records), "the wait for the connection's end is no part of it"


def test_a_server_that_ends_its_streams_without_the_last_word_has_answered(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=2, lengths=(5, 3)), behave="no done", keep_text=True)
    assert [(r.outcome, r.error, r.text, r.finish_reason) for r in records] == [("answered", None, "xxx", "length")] * 2


def test_a_connection_that_is_kept_open_after_an_answer_holds_nobody_up(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_teach.performance.load_test.client._LINGER", 0.05)
    records, _ = drive(server.url, LoadPlan(ClosedLoop(1), 3, lengths=(5, 3)), behave="linger")
    assert [r.outcome for r in records] == ["answered"] * 3
    assert records[-1].due < 30, "the server lingers for a minute"
    wait_until(lambda: server.left == 3)


def test_a_whole_answer_where_a_stream_was_asked_for_is_a_bad_answer(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=1), form={"extra": {"stream": False}})
    assert records[0].error == "bad answer: application/json where a stream was asked for"


@pytest.mark.parametrize(("behave", "events"), [("hang", 0), ("stall", 2)])
def test_a_timeout_before_and_in_an_answer(server: Any, behave: str, events: int) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=2, lengths=(5, 4)), behave=behave, timeout=0.5)
    assert [(r.outcome, r.error, r.events) for r in records] == [("failed", "timeout", events)] * 2
    assert all(r.e2e >= 0.499 for r in records)
    wait_until(lambda: server.left == 2)


def test_a_server_that_is_not_there(server: Any) -> None:
    records, _ = drive("http://127.0.0.1:9", LoadPlan(num_requests=5))
    assert [(r.outcome, r.error) for r in records] == [("failed", "connection refused")] * 5


class Aborts(LoadPlan):
    """Hangs up on every request: the even ones after three events, the odd ones after 50 ms."""

    def requests(self) -> Iterator[PlannedRequest]:
        for number in range(self.num_requests):
            yield PlannedRequest(number, None, 5, 500, Abort(0.05, 3 if number % 2 == 0 else None))


def test_aborts_hang_up_after_their_event_or_time_and_the_server_sees_it(server: Any) -> None:
    records, _ = drive(server.url, Aborts(num_requests=6), behave="slow")
    assert {(r.outcome, r.error) for r in records} == {("aborted", None)}
    assert [r.events for r in records if r.index % 2 == 0] == [3, 3, 3]
    assert all(r.e2e >= 0.049 for r in records if r.index % 2)
    wait_until(lambda: server.open == 0 and server.left >= 3)


def test_without_a_stream_aborts_go_by_time(server: Any) -> None:
    records, _ = drive(server.url, Aborts(num_requests=4), behave="hang", form={"stream": False})
    assert {r.outcome for r in records} == {"aborted"}


def test_an_abort_that_comes_too_late_is_an_answer(server: Any) -> None:
    class Late(LoadPlan):
        def requests(self) -> Iterator[PlannedRequest]:
            yield PlannedRequest(0, None, 5, 4, Abort(30.0, None))

    [record], _ = drive(server.url, Late())
    assert record.outcome == "answered"


def test_malformed_requests_are_to_be_refused(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=60, malformed_share=1.0))
    assert {(r.outcome, r.error) for r in records} == {("refused", "http 400 invalid_request_error")}
    assert not server.seen


def test_a_server_that_takes_a_malformed_request_or_is_too_busy_to_see_is_not_right(server: Any) -> None:
    class Tame(RequestForm):
        def malformed_body(self, prompt: Any, max_tokens: int, kind: float) -> bytes:
            return self.body(prompt, max_tokens)

    plan = LoadPlan(num_requests=2, malformed_share=1.0)
    for behave, error in ((None, "malformed request accepted: http 200"), ("busy", "http 429 rate_limit_error")):
        records: list[RequestRecord] = []

        async def main(behave: str | None = behave, records: list[RequestRecord] = records) -> None:
            target = Target(server.url)
            form = Tame("fake", extra={"behave": behave})
            async with target.session() as session:
                await LoadClient(session, target, form, plan, lambda r: ([1], 1), records.append).run()

        asyncio.run(main())
        assert [(r.outcome, r.error, r.malformed) for r in records] == [("failed", error, True)] * 2


@pytest.mark.parametrize("max_in_flight", [1, 100])
def test_no_coordinated_omission(server: Any, max_in_flight: int) -> None:
    """A server that takes 20 ms, one by one, asked every 5 ms: the wait of each request grows by 15 ms.

    A client that counted from when it sent would see 20 ms for all, if it sent one at a time.
    """
    plan = LoadPlan(OpenLoop(200, "fixed", max_in_flight=max_in_flight), 20, lengths=(5, 1))
    records, client = drive(server.url, plan, behave="in turn")
    records.sort(key=lambda record: record.end)
    assert [record.due for record in sorted(records, key=lambda r: r.index)] == pytest.approx(
        [number * 0.005 for number in range(20)]
    )
    for served, record in enumerate(records, 1):
        assert record.end >= 0.0199 * served
        assert record.e2e >= 0.0199 * served - 0.005 * record.index
    assert records[-1].e2e >= 0.3
    assert records[-1].ttft is not None
    assert records[-1].ttft >= 0.3
    assert (client.held_back > 0) == (max_in_flight == 1)
    assert server.most <= max_in_flight


def test_an_open_loop_sends_however_slow_the_answers_are(server: Any) -> None:
    """The server answers nobody before all twelve have asked."""
    records, _ = drive(server.url, LoadPlan(OpenLoop(200, "fixed"), 12, lengths=(5, 1)), behave="twelve at once")
    assert [record.outcome for record in records] == ["answered"] * 12
    assert server.most == 12
    assert all(record.sent >= record.due - 1e-6 for record in records)


def test_the_duration_ends_the_sending_and_what_was_sent_is_waited_for(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(OpenLoop(100, "fixed"), 10**6, (5, 20), duration=0.095), behave="slow")
    assert sorted(record.index for record in records) == list(range(10))
    assert {record.outcome for record in records} == {"answered"}
    records, _ = drive(server.url, LoadPlan(ClosedLoop(2), 10**6, (5, 2), duration=0.1), behave="slow")
    assert 0 < len(records) < 1000
    assert all(record.due <= 0.1 for record in records)


def test_warm_up_is_not_recorded(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(ClosedLoop(2), 3, warm_up=5))
    assert len(server.seen) == 8
    assert sorted(record.index for record in records) == [0, 1, 2]


def own_tasks() -> int:
    """How many requests have a task; the library has some of its own, for bodies that it sends."""
    return sum("LoadClient" in getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


def test_tasks_are_no_more_than_requests_in_flight(server: Any) -> None:
    seen: list[int] = []
    plan = LoadPlan(OpenLoop(5000, "fixed", max_in_flight=8), 200, (5, 1))
    drive(server.url, plan, on_record=lambda record: seen.append(own_tasks()))
    assert max(seen) == 8


@pytest.mark.parametrize("arrivals", [ClosedLoop(40), OpenLoop(1e9, "fixed")])
def test_what_is_due_is_sent_in_one_turn_of_the_loop(server: Any, arrivals: Any) -> None:
    """Not one a turn: then a busy loop would set the pace, and not the plan."""
    tasks: list[int] = []

    def prompt(request: PlannedRequest) -> tuple[list[int], int]:
        tasks.append(own_tasks())
        return [1], 1

    drive(server.url, LoadPlan(arrivals, 40, (1, 1)), prompt=prompt)
    assert tasks[0] == 40  # when the first begins, all are there


def test_an_error_of_the_listener_ends_the_test_as_it_is(server: Any) -> None:
    def full(record: RequestRecord) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        drive(server.url, LoadPlan(ClosedLoop(3), 100), on_record=full)


def test_a_cancelled_run_hangs_up_and_counts_what_it_left(server: Any) -> None:
    records: list[RequestRecord] = []

    async def main() -> int:
        target = Target(server.url)
        async with target.session() as session:
            form = RequestForm("fake", extra={"behave": "stall"})
            client = LoadClient(session, target, form, LoadPlan(ClosedLoop(5), 50), lambda r: ([1], 1), records.append)
            running = asyncio.create_task(client.run())
            while server.open < 5:
                await asyncio.sleep(0.005)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert len(asyncio.all_tasks()) == 1
            return client.unfinished

    assert asyncio.run(main()) == 5
    assert records == []
    wait_until(lambda: server.left == 5)


def test_the_key_goes_to_the_server_and_nowhere_else(server: Any) -> None:
    drive(server.url, LoadPlan(num_requests=1), api_key="secret")
    assert server.keys == {"Bearer secret": 1}
    assert "secret" not in repr(Target(server.url, "secret"))


def test_records_are_plain_data(server: Any) -> None:
    records, _ = drive(server.url, LoadPlan(num_requests=1, lengths=(5, 3)))
    plain = json.loads(json.dumps(records[0].to_json()))
    assert plain["outcome"] == "answered"
    assert plain["e2e"] == records[0].e2e
    assert plain["longest_gap"] == max(records[0].gaps)
    assert "error" not in plain
    assert "gaps" not in plain
