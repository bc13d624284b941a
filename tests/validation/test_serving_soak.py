"""The soak finds what it looks for: a small crowd passes, and each fault that it counts fails it."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from vllm_teach.errors import EngineDeadError
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
    # Its memory still grows, as sixty requests do not warm a server up.
    assert replace(report, memory=(1, 1)).passed(), str(report)
    assert set(report.outcomes) == {"aborted", "answered", "refused"}


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
    "fault",
    [
        {"failures": ["timeout: none"]},
        {"wrong": [3]},
        {"held": 0.01},
        {"memory": (100, 105)},
        {"lag_p99": 0.25},
        {"health": Health([0.01], ["refused"])},
        {"exit_status": 1},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_each_fault_fails_it(fault):
    assert GOOD.passed()
    assert not replace(GOOD, **fault).passed()
    assert "FAILED" in str(replace(GOOD, **fault))
