"""The soak finds what it looks for: a small crowd passes, and each fault that it counts fails it."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from vllm_teach.errors import EngineDeadError
from vllm_teach.performance.load_test.plan import LoadPlan
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.requests import malformed_way
from vllm_teach.validation import serving_soak
from vllm_teach.validation.serving_soak import Health, SoakReport, run_soak

GOOD = SoakReport(
    outcomes={"answered": 9, "refused": 1},
    failures=[],
    compared=9,
    wrong=[],
    held=0.0,
    memory=(100, 104),
    lag_p99=0.1,
    health=Health([0.01]),
    exit_status=0,
)


def test_a_small_crowd_gets_the_offline_engines_answers():
    report = run_soak("tiny", 60, 12, progress=False)
    assert report.compared >= 40
    assert report.health.seconds
    assert not report.health.failures
    # Its memory still grows, as sixty requests do not warm a server up, and no test is about the clock.
    untimed = replace(report, memory=(1, 1), lag_p99=0.0, health=Health())
    assert untimed.passed(), str(report)
    # One that was to be aborted may have ended before.
    assert {"answered", "refused"} <= set(report.outcomes) <= {"aborted", "answered", "refused"}


def test_another_answer_is_found(monkeypatch):
    seen = []

    def answer_of_another_prompt(model, plan, answered, progress):
        answered[0].text += "x"
        seen.append(answered[0].index)
        return whole(model, plan, answered, progress)

    whole = serving_soak._unlike_offline
    monkeypatch.setattr(serving_soak, "_unlike_offline", answer_of_another_prompt)
    report = run_soak("tiny", 20, 5, progress=False)
    assert report.wrong == seen
    assert not report.passed()


def test_an_error_that_is_not_the_right_one_is_found():
    plan = LoadPlan(num_requests=40, malformed_share=0.5)
    ways = {each.index: malformed_way(each.malformed) for each in plan.requests() if each.malformed is not None}
    assert {"an unknown model", "an empty body"} <= set(ways.values())
    all_400 = [RequestRecord(index, 1, 1, error="http 400 invalid_request_error") for index in ways]
    wrong = serving_soak._not_rightly_refused(plan, all_400)
    assert wrong == [index for index, way in ways.items() if way == "an unknown model"]


@pytest.mark.parametrize(
    ("outcome", "text", "right"),
    [
        ("answered", "the sea", True),
        ("answered", "the", False),
        ("aborted", "the", True),
        ("aborted", "", True),
        ("aborted", "a", False),
    ],
)
def test_an_answer_must_be_whole_and_an_aborted_one_its_beginning(outcome, text, right):
    record = RequestRecord(0, 1, 1, outcome=outcome, text=text)
    assert serving_soak._agrees(record, "the sea") is right


def test_a_server_that_does_not_start_is_told_so():
    with pytest.raises(EngineDeadError, match="no/such/folder"):
        run_soak("no/such/folder", 20, 5, progress=False)


def test_a_server_that_never_answers_its_health_fails_in_words():
    assert "0 answers" in str(replace(GOOD, health=Health([], ["refused"])))


def test_a_server_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(serving_soak, "_END_SECONDS", 0.2)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        server.stdout.readline()
        assert serving_soak._end(server) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"failures": ["timeout: none"]}, "a request failed"),
        ({"wrong": [3]}, "offline engine's"),
        ({"held": 0.01}, "blocks are held"),
        ({"memory": (100, 105)}, "memory grew by 5%"),
        ({"lag_p99": 0.25}, "lag is above 100 ms"),
        ({"health": Health([0.01], ["refused"])}, "/health did not always answer"),
        ({"health": Health([0.01, 1.5])}, "/health took over 1 s"),
        ({"exit_status": 1}, "status 0"),
    ],
    ids=str,
)
def test_each_fault_fails_it_and_is_named(fault, told):
    assert GOOD.passed()
    report = replace(GOOD, **fault)
    assert not report.passed()
    (broken,) = report.broken()
    assert told in broken
    assert f"FAILED: {broken}" in str(report)
