"""A crowd begins a few at a time: in each pass of the event loop, in order, and nobody is forgotten."""

import asyncio

import pytest

from vllm_teach.serving.http.turns import InTurn, Turns


async def passes(turns: Turns, callers: int) -> list[int]:
    """Return the passes of the event loop in which each caller got its turn, in the order of the turns."""
    now, got = 0, []

    async def call(number: int) -> None:
        await turns.wait()
        got.append((now, number))

    tasks = [asyncio.create_task(call(number)) for number in range(callers)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        now += 1
    assert [number for _, number in got] == list(range(callers))
    return [when for when, _ in got]


@pytest.mark.parametrize("callers", [1, 8])
def test_a_few_have_their_turn_at_once(callers):
    assert asyncio.run(passes(Turns(8), callers)) == [0] * callers


def test_of_a_crowd_no_more_than_a_few_begin_in_a_pass():
    found = asyncio.run(passes(Turns(8), 500))
    assert max(found.count(when) for when in set(found)) == 8
    assert max(found) <= 500 // 8 + 2  # and no pass is wasted


def test_each_crowd_finds_the_same():
    async def twice() -> tuple[list[int], list[int]]:
        turns = Turns(3)
        first = await passes(turns, 10)
        await asyncio.sleep(0.01)
        return first, await passes(turns, 10)

    first, second = asyncio.run(twice())
    assert first == second


def test_who_gives_up_takes_nobodys_turn():
    async def try_it() -> list[int]:
        turns, got = Turns(1), []

        async def call(number: int) -> None:
            await turns.wait()
            got.append(number)

        tasks = [asyncio.create_task(call(number)) for number in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1:5]:
            task.cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
        return got

    assert asyncio.run(try_it()) == [0, 5]


def test_one_that_begins_between_passes_waits_behind_those_before_it():
    async def try_it() -> list[str]:
        turns, got = Turns(1), []

        async def call(name: str) -> None:
            await turns.wait()
            got.append(name)

        tasks = [asyncio.create_task(call(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(call("late")))
        await asyncio.gather(*tasks)
        return got

    assert asyncio.run(try_it()) == ["a", "b", "c", "late"]


def test_health_is_asked_past_the_crowd():
    """A probe does not stand behind 200 requests."""
    begun: list[str] = []

    async def app(scope, receive, send) -> None:
        begun.append(scope["method"])

    async def try_it() -> None:
        in_turn = InTurn(app)
        crowd = [{"type": "http", "method": "POST"}] * 200 + [{"type": "http", "method": "GET"}]
        await asyncio.gather(*(in_turn(scope, None, None) for scope in crowd))

    asyncio.run(try_it())
    assert len(begun) == 201
    assert begun.index("GET") == 8
