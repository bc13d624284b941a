"""Silence for the whole time is a hang, anything said is not, and a late look alone is none; on a clock of its own."""

import heapq
import itertools

from vllm_teach.serving.async_engine.hang_watch import HangWatch


class Clock:
    """The part of an event loop that has timers, without waiting."""

    def __init__(self):
        self.now, self._timers, self._order = 0.0, [], itertools.count()

    def call_later(self, delay, call):
        timer = Timer(self.now + delay, call)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def advance_to(self, moment):
        while self._timers and self._timers[0][0] <= moment:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if not timer.cancelled:
                timer.call()
        self.now = max(self.now, moment)

    @property
    def num_timers(self):
        return sum(not timer.cancelled for _, _, timer in self._timers)


class Timer:
    def __init__(self, when, call):
        self.when, self.call, self.cancelled = when, call, False

    def cancel(self):
        self.cancelled = True


def make_watch(clock, heard, hangs):
    return HangWatch(clock, 10.0, lambda: heard[0], lambda: hangs.append(clock.now))


def test_silence_is_a_hang_once():
    clock, heard, hangs = Clock(), [0], []
    watch = make_watch(clock, heard, hangs)
    watch.start()
    clock.advance_to(9.9)
    assert hangs == []
    clock.advance_to(100)
    assert hangs == [10.0]
    assert clock.num_timers == 0


def test_who_says_something_now_and_then_does_not_hang():
    clock, heard, hangs = Clock(), [0], []
    watch = make_watch(clock, heard, hangs)
    watch.start()
    for moment in range(1, 30):
        heard[0] += 1
        last = clock.now
        clock.advance_to(moment * 6)
    assert hangs == []
    clock.advance_to(1000)
    assert len(hangs) == 1
    assert 10 <= hangs[0] - last <= 15


def test_idle_time_does_not_count():
    clock, heard, hangs = Clock(), [0], []
    watch = make_watch(clock, heard, hangs)
    watch.start()
    clock.advance_to(9)
    watch.stop()
    clock.advance_to(50)
    watch.start()
    watch.start()
    assert clock.num_timers == 1
    clock.advance_to(59)
    assert hangs == []
    clock.advance_to(60)
    assert hangs == [60.0]


def test_one_late_look_is_no_hang():
    """The event loop was held up for minutes, and the looks come before what was said meanwhile."""
    clock, heard, hangs = Clock(), [0], []
    watch = make_watch(clock, heard, hangs)
    watch.start()
    clock.now = 300.0  # nothing ran until now
    clock.advance_to(300.0)
    heard[0] += 1
    clock.advance_to(306)
    assert hangs == []
