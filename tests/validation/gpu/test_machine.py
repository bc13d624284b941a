import json
import re
from types import SimpleNamespace

import pytest
import torch

from vllm_teach import resources
from vllm_teach.validation.gpu import clock as gpu_clock
from vllm_teach.validation.gpu import machine as gpu_machine


def test_a_cpu_is_described_without_a_gpus_fields():
    machine = gpu_machine.describe("cpu")
    assert machine["gpus"] == 0
    assert machine["device"].startswith("cpu (")
    assert machine["packages"]["torch"] == torch.__version__
    assert "capability" not in machine
    json.dumps(machine, allow_nan=False)


@pytest.fixture
def fake_gpu(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=150_000_000_000, multi_processor_count=132, L2_cache_size=60 << 20
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_gpu_is_described_with_its_clocks(fake_gpu, monkeypatch):
    answers = {"nvidia-smi": "580.159.03, 345, 3201, 1980, 700.00, [N/A]\n"}
    monkeypatch.setattr(gpu_machine, "_output", lambda *command: answers.get(command[0]))
    machine = gpu_machine.describe("cuda")
    assert (machine["device"], machine["capability"], machine["gpus"]) == ("NVIDIA H200", [9, 0], 1)
    assert machine["driver"] == "580.159.03"
    assert (machine["sm_clock_mhz"], machine["max_sm_clock_mhz"], machine["power_limit_w"]) == (345, 1980, 700)
    assert machine["temperature_c"] is None
    json.dumps(machine, allow_nan=False)


def test_without_nvidia_smi_the_driver_is_unknown(fake_gpu, monkeypatch):
    monkeypatch.setattr(gpu_machine, "_output", lambda *command: None)
    assert gpu_machine.describe("cuda")["driver"] is None


def test_the_commit_is_that_of_the_checkout(monkeypatch):
    found = gpu_machine.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found)
    answers = iter(["f" * 40, " M file"])
    monkeypatch.setattr(gpu_machine, "_output", lambda *command: next(answers))
    assert gpu_machine.commit() == "f" * 40 + "+changes"
    monkeypatch.setattr(resources, "checkout_root", lambda: None)
    assert gpu_machine.commit() is None


def test_a_program_that_is_not_there_or_fails_gives_nothing():
    assert gpu_machine._output("no-such-program-anywhere") is None
    assert gpu_machine._output("git", "no-such-command") is None


def test_a_call_on_the_cpu_is_timed():
    calls = []
    figures = gpu_clock.measure(lambda: calls.append(1), "cpu", repeats=3)
    assert len(calls) == 2 + 3 + 3  # to warm up, one by one, in a row
    assert 0 <= figures["low_ms"] <= figures["median_ms"] <= figures["high_ms"]
    assert figures["repeats"] == 3
    assert figures["back_to_back_ms"] >= 0


def test_a_call_on_a_gpu_is_queued_behind_other_work_and_a_flushed_cache(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 2.5

    buffer = SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(gpu_clock, "_flush_buffer", lambda: buffer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("busy"))
    figures = gpu_clock.measure(lambda: log.append("call"), "cuda", repeats=1)
    assert log[2:9] == ["synchronize", "flush", "busy", "event", "call", "event", "wait"]
    assert figures["median_ms"] == 2.5
