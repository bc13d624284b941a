"""What the reader of a request gets, whatever order things happen in."""

import asyncio
import gc

import pytest

from vllm_teach.errors import EngineError, InvalidArgumentError
from vllm_teach.serving.async_engine.messages import CompletionDelta, RequestDelta
from vllm_teach.serving.async_engine.request_stream import OpenRequest, RequestStream

PROMPT = {"prompt_token_ids": [5, 6], "prompt": None, "cache_salt": None}


def delta(text, finished=False, **more):
    reason = "length" if finished else None
    return RequestDelta("r", (CompletionDelta(0, text, (1,), finish_reason=reason),), finished=finished, **more)


class Opened:
    """A request with its stream; `closed` and `dropped` hold what the stream asked of the engine."""

    def __init__(self):
        self.request, self.closed, self.dropped = OpenRequest("r", PROMPT), [], []
        self.stream = RequestStream(self.request, self._close, self.dropped.append)

    def _close(self, request):
        self.closed.append(request)
        request.close()


async def read(stream):
    return ["".join(each.text for each in delta.completions) async for delta in stream]


def test_what_came_before_the_reader_is_one_delta_and_what_comes_later_another():
    async def run():
        opened = Opened()
        opened.request.put(delta("a"))
        opened.request.put(delta("b"))
        reader = asyncio.create_task(read(opened.stream))
        await asyncio.sleep(0)
        opened.request.put(delta("c", finished=True))
        return await reader, await read(opened.stream), opened.dropped

    assert asyncio.run(run()) == (["ab", "c"], [], [])


@pytest.mark.parametrize("by_delta", [True, False])
def test_an_error_comes_once_and_behind_what_came_before_it(by_delta):
    async def run():
        opened = Opened()
        opened.request.put(delta("a"))
        error = EngineError("it failed: send it again.")
        if by_delta:
            opened.request.put(RequestDelta("r", finished=True, error=error))
        else:
            opened.request.fail(error)
        opened.request.put(delta("late"))
        opened.request.fail(EngineError("a second one"))
        first = await anext(opened.stream)
        with pytest.raises(EngineError, match="it failed") as caught:
            await anext(opened.stream)
        assert caught.value is not error
        return first.completions[0].text, await read(opened.stream)

    assert asyncio.run(run()) == ("a", [])


def test_an_error_wakes_the_reader():
    async def run():
        opened = Opened()
        reader = asyncio.create_task(read(opened.stream))
        await asyncio.sleep(0)
        opened.request.fail(EngineError("it failed"))
        with pytest.raises(EngineError, match="it failed"):
            await reader

    asyncio.run(run())


def test_a_cancelled_reader_loses_nothing():
    async def run():
        opened = Opened()
        reader = asyncio.create_task(anext(opened.stream))
        await asyncio.sleep(0)
        opened.request.put(delta("a"))
        reader.cancel()  # what came for it is there for the next one
        with pytest.raises(asyncio.CancelledError):
            await reader
        opened.request.put(delta("b", finished=True))
        return await read(opened.stream)

    assert asyncio.run(run()) == ["ab"]


def test_two_readers_at_once_are_refused():
    async def run():
        opened = Opened()
        reader = asyncio.create_task(read(opened.stream))
        await asyncio.sleep(0)
        with pytest.raises(InvalidArgumentError, match="one task"):
            await anext(opened.stream)
        opened.request.put(delta("a", finished=True))
        return await reader

    assert asyncio.run(run()) == ["a"]


def test_closing_forgets_what_is_unread_and_is_told_once_it_matters():
    async def run():
        opened = Opened()
        opened.request.put(delta("a"))
        async with opened.stream:
            pass
        assert opened.closed == [opened.request]
        assert opened.request.unread == []
        return await read(opened.stream)

    assert asyncio.run(run()) == []


@pytest.mark.parametrize(("ends", "dropped"), [(False, 1), (True, 0)])
def test_a_stream_that_is_forgotten_is_told_unless_it_has_ended(ends, dropped):
    opened = Opened()
    opened.request.put(delta("a", finished=ends))
    del opened.stream
    gc.collect()
    assert len(opened.dropped) == dropped


def test_timers_end_with_the_request():
    class Timer:
        cancelled = False

        def cancel(self):
            self.cancelled = True

    for end in (OpenRequest.close, lambda request: request.put(delta("", finished=True))):
        request, timer = OpenRequest("r", PROMPT), Timer()
        request.timers.append(timer)
        end(request)
        assert timer.cancelled
