"""What is said of the time in attention, on a clock that only the layers and the model move."""

from contextlib import contextmanager

import pytest
import torch

from vllm_teach.engine import attention_meter
from vllm_teach.engine.attention_meter import GPU_PASSES, AttentionMeter


class Layers:
    """An `attend` of two kinds of layers; each call takes a second, and one with a window two."""

    broken: int | None = None  # the call that fails

    def __init__(self, clock) -> None:
        self.clock, self.calls = clock, []

    def __call__(self, layer, q, k, v, *, window=None):
        self.clock.now += 1 if window is None else 2
        self.calls.append((layer, window))
        if len(self.calls) == self.broken:
            raise RuntimeError("broken")
        return q

    def backend(self, window) -> str:
        return "sdpa" if window is None else "flex"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def forward(meter: AttentionMeter, layers: Layers, seconds: float = 10.0) -> None:
    """A pass of three layers, which takes `seconds` beside them."""
    q = torch.zeros(1)
    with meter.watch(layers) as attend:
        layers.clock.now += seconds
        for layer, window in enumerate([None, 8, None]):
            assert attend(layer, q, q, q, window=window) is q


def test_calls_and_seconds_add_up_over_the_passes(clock: Clock) -> None:
    meter, layers = AttentionMeter(torch.device("cpu")), Layers(clock)
    for _ in range(3):
        forward(meter, layers)
        clock.now += 100  # sampling, say: no part of the pass
    meter.settle()
    assert meter.calls == {"sdpa": 6, "flex": 3}
    assert meter.attention_seconds == 3 * (1 + 2 + 1)
    assert meter.forward_seconds == 3 * (10 + 4)
    assert layers.calls[:3] == [(0, None), (1, 8), (2, None)]


def test_a_pass_that_fails_counts_for_nothing_and_the_next_one_does(clock: Clock) -> None:
    meter, layers = AttentionMeter(torch.device("cpu")), Layers(clock)
    layers.broken = 2
    with pytest.raises(RuntimeError, match="broken"):
        forward(meter, layers)
    meter.settle()
    assert (meter.calls, meter.forward_seconds, meter.attention_seconds) == ({}, 0, 0)
    forward(meter, layers)
    meter.settle()
    assert meter.calls == {"sdpa": 2, "flex": 1}
    assert meter.attention_seconds == 4


class Event:
    """A CUDA event of a device that has done what it was told when `synchronize` is called."""

    clock: Clock
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.done = False

    def record(self, stream) -> None:
        assert stream == "the device's stream"
        Event.recorded += 1
        self.time = Event.clock.now

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.done
        return (end.time - self.time) * 1e3


def test_a_device_times_one_pass_in_eight_and_counts_the_calls_of_all(clock: Clock, monkeypatch) -> None:
    Event.clock, Event.recorded = clock, 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the device's stream")
    meter, layers = AttentionMeter(torch.device("cuda:1")), Layers(clock)
    for number in range(2 * GPU_PASSES):
        forward(meter, layers, seconds=100 * number)
    assert meter.calls == {"sdpa": 32, "flex": 16}
    assert Event.recorded == 2 * (2 + 2 * 3)
    meter.settle()
    meter.settle()
    # The first pass and the ninth; what each took beside its layers was told above.
    assert meter.attention_seconds == pytest.approx(2 * 4)
    assert meter.forward_seconds == pytest.approx(4 + 4 + 800)


def test_an_engine_counts_each_layer_of_each_step_for_the_backend_that_served(make_llm) -> None:
    llm = make_llm(attention_backend="naive")
    llm.generate([[1, 2, 3], [4, 5, 6, 7]], use_tqdm=False)
    steps = llm.engine.events.step
    meter = llm.engine.runner.meter
    meter.settle()
    assert meter.calls == {"naive": steps * llm.model.config.num_layers}
    assert 0 < meter.attention_seconds < meter.forward_seconds


def test_what_watches_a_pass_changes_nothing_that_it_computes(make_llm, monkeypatch) -> None:
    @contextmanager
    def unwatched(self, attend):
        yield attend

    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    seen = [each.outputs[0].token_ids for each in make_llm().generate(prompts, use_tqdm=False)]
    monkeypatch.setattr(attention_meter.AttentionMeter, "watch", unwatched)
    assert seen == [each.outputs[0].token_ids for each in make_llm().generate(prompts, use_tqdm=False)]
