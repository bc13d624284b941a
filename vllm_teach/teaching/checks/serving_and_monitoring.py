"""Checks of lesson 11: a stream read from its bytes, a counter over a restart, a percentile from buckets, a replica."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from vllm_teach.teaching.answers import Judged
from vllm_teach.teaching.exercises import Case, Check

LESSON = "11_serving_and_monitoring"


def _event(*texts: str, **more: object) -> str:
    """One event of a completion stream: a choice for each text."""
    choices = [{"index": index, "text": text, "finish_reason": None} for index, text in enumerate(texts)]
    return f"data: {json.dumps({'choices': choices} | more, ensure_ascii=False)}\n\n"


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut `data` into pieces of these sizes, again and again."""
    pieces, start, turn = [], 0, 0
    while start < len(data):
        pieces.append(data[start : start + sizes[turn % len(sizes)]])
        start, turn = start + sizes[turn % len(sizes)], turn + 1
    return pieces


def _judge_text(expected: str) -> Judged:
    def problem(got: object) -> str | None:
        return None if isinstance(got, str) and got == expected else f"expected the text {expected!r}, got {got!r:.120}"

    return Judged(problem)


def _stream_cases(generator: torch.Generator) -> Iterator[Case]:
    plain, done = [_event("The"), _event(" sea"), _event(" is calm.")], "data: [DONE]\n\n"
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    lines = _event("first\n\ndata: no event"), _event("\nthird")
    settings: list[tuple[str, str, str, str, list[int]]] = [
        ("an event a piece", "What stands after 'data: ' is JSON.", "".join(plain) + done, "The sea is calm.", [55]),
        ("all at once", "Several events may come in one piece.", "".join(plain) + done, "The sea is calm.", [9999]),
        ("byte by byte", "A piece may end anywhere in an event.", "".join(plain) + done, "The sea is calm.", [1]),
        (
            "letters of several bytes",
            "A piece may end in the middle of a letter: join bytes first, then decode.",
            _event("d’été, ") + _event("naïve 🙂") + done,
            "d’été, naïve 🙂",
            [3],
        ),
        ("a usage event", "An event may have no choice.", "".join(plain) + usage + done, "The sea is calm.", [30, 7]),
        (
            "a comment to keep alive",
            "A line that begins with a colon is a comment.",
            ": ping\n\n" + plain[0] + ": ping\n\n" + plain[1] + done,
            "The sea",
            [13],
        ),
        (
            "line breaks in the text",
            "JSON escapes the text's own line breaks.",
            "".join(lines) + done,
            "first\n\ndata: no event\nthird",
            [20],
        ),
        ("nothing generated", "A stream may have no text at all.", _event("") + done, "", [8]),
        ("an end without more", "What comes after [DONE] is not read.", plain[0] + done + plain[1], "The", [25]),
    ]
    for number in range(3):
        sizes = torch.randint(1, 40, (5,), generator=generator).tolist()
        text = "".join(plain) + _event(" É") + usage + done
        settings.append((f"drawn {number + 1}", "Cut it where you like.", text, "The sea is calm. É", sizes))
    for label, rule, stream, text, sizes in settings:
        yield Case(f"{label}: pieces of {sizes} bytes", (_cut(stream.encode(), sizes),), _judge_text(text), rule)


def _grown(values: list[float]) -> float:
    """Walk through the counter, event by event."""
    total, last = 0.0, values[0]
    for value in values[1:]:
        total += value if value < last else value - last
        last = value
    return total


def _counter_cases(generator: torch.Generator) -> Iterator[Case]:
    settings: list[tuple[str, str, list[float]]] = [
        ("it grows", "Without a restart it is the last value minus the first.", [10.0, 14.0, 30.0]),
        ("it stands still", "No events, no increase.", [7.0, 7.0, 7.0]),
        ("a restart", "A value below the one before means that the counter began at 0 again.", [90.0, 100.0, 5.0, 9.0]),
        ("two restarts", "Each restart counts from 0.", [50.0, 3.0, 8.0, 1.0]),
        ("a restart to 0", "After a restart the counter may still be 0.", [40.0, 0.0, 6.0]),
        ("back where it was", "What was counted before the restart is not lost.", [20.0, 25.0, 5.0, 25.0]),
        ("one scrape", "One value says nothing of growth: 0.", [12.0]),
        ("it starts high", "The first value is where the window begins; it is not growth.", [1000.0, 1001.0]),
    ]
    for number in range(3):
        steps = torch.randint(0, 30, (9,), generator=generator).tolist()
        values, level = [], 100.0
        for place, step in enumerate(steps):
            level = float(step) if place == 3 + number else level + step
            values.append(level)
        settings.append((f"drawn {number + 1}", "Add up the growth between neighbours.", values))
    for label, rule, values in settings:
        yield Case(f"{label}: {values}", (values,), _grown(values), rule)


def _inverted(buckets: list[tuple[float, float]], share: float) -> float:
    """Halve an interval on the piecewise straight count, which is flat beyond the last finite bound."""
    points = [(0.0, 0.0), *[(bound, count) for bound, count in buckets if math.isfinite(bound)]]
    rank = share * buckets[-1][1]
    if rank > points[-1][1]:
        return points[-1][0]

    def count_at(x: float) -> float:
        for (a, low), (b, high) in pairwise(points):
            if x <= b:
                return low + (high - low) * (x - a) / (b - a)
        return points[-1][1]

    low, high = 0.0, points[-1][0]
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if count_at(middle) < rank else (low, middle)
    return high


def _bucket_cases(generator: torch.Generator) -> Iterator[Case]:
    inf = math.inf
    settings: list[tuple[str, str, list[tuple[float, float]], float]] = [
        ("in the first bucket", "The first bucket begins at 0.", [(1.0, 10.0), (2.0, 20.0), (inf, 20.0)], 0.25),
        (
            "in the second",
            "The counts are cumulative: subtract those below.",
            [(1.0, 10.0), (2.0, 20.0), (inf, 20.0)],
            0.75,
        ),
        (
            "uneven bounds",
            "A bucket is as wide as its bounds are apart.",
            [(0.1, 4.0), (0.5, 8.0), (5.0, 10.0), (inf, 10.0)],
            0.9,
        ),
        ("p99", "The rank is share · all.", [(0.1, 50.0), (0.5, 90.0), (1.0, 100.0), (inf, 100.0)], 0.99),
        (
            "beyond the last bound",
            "Above the last finite bound, that bound is all that is known.",
            [(1.0, 5.0), (2.0, 8.0), (inf, 10.0)],
            0.95,
        ),
        ("at a bound", "A rank that is reached at a bound is the bound.", [(1.0, 5.0), (2.0, 10.0), (inf, 10.0)], 0.5),
        (
            "an empty bucket",
            "A bucket that nobody fell into is stepped over.",
            [(1.0, 5.0), (2.0, 5.0), (3.0, 10.0), (inf, 10.0)],
            0.8,
        ),
        (
            "empty at the front",
            "Empty buckets at the front are stepped over, too.",
            [(1.0, 0.0), (2.0, 4.0), (inf, 4.0)],
            0.5,
        ),
    ]
    for number in range(3):
        counts = torch.randint(1, 30, (4,), generator=generator).cumsum(0).tolist()
        buckets = [*zip((0.2, 0.5, 1.0, 4.0), map(float, counts), strict=True), (inf, float(counts[-1]))]
        settings.append(
            (f"drawn {number + 1}", "A straight line across the bucket.", buckets, (0.5, 0.9, 0.99)[number])
        )
    for label, rule, buckets, share in settings:
        yield Case(f"{label}: {buckets}, share {share}", (buckets, share), _inverted(buckets, share), rule)


def _picked(in_flight: list[int], up: list[bool], turn: int) -> int:
    """Look at the replicas from `turn` on, and keep the first that has fewer than all before it."""
    best, count = -1, len(in_flight)
    for step in range(count):
        index = (turn + step) % count
        if up[index] and (best < 0 or in_flight[index] < in_flight[best]):
            best = index
    return best


def _pick_cases(generator: torch.Generator) -> Iterator[Case]:
    yes = [True, True, True]
    settings: list[tuple[str, str, list[int], list[bool], int]] = [
        ("one has the fewest", "The replica with the fewest requests in flight gets it.", [3, 1, 2], yes, 0),
        ("the fewest, another turn", "The turn decides only between equals.", [3, 1, 2], yes, 2),
        ("all equal", "Of equals, the one whose turn it is.", [2, 2, 2], yes, 1),
        ("equals behind the turn", "The turn goes around: after the last comes the first.", [1, 1, 2], yes, 2),
        ("two equal", "Of equals, the next from the turn on.", [4, 0, 0], yes, 2),
        (
            "the best is down",
            "A replica that is down gets nothing, however idle it is.",
            [5, 0, 2],
            [True, False, True],
            0,
        ),
        ("one is left", "If one is up, it gets everything.", [9, 0, 0], [True, False, False], 1),
        ("all are down", "If none is up, say -1: the balancer answers with an error.", [0, 0, 0], [False] * 3, 0),
        ("a turn beyond", "The turn grows for ever: take it modulo the number of replicas.", [1, 1, 1], yes, 7),
        ("one replica", "One replica is a fleet, too.", [8], [True], 5),
    ]
    for number in range(4):
        loads = torch.randint(0, 3, (6,), generator=generator).tolist()
        up = (torch.rand(6, generator=generator) < 0.7).tolist()
        turn = int(torch.randint(0, 20, (1,), generator=generator))
        settings.append(
            (f"drawn {number + 1}", "Fewest first, then the turn, only those that are up.", loads, up, turn)
        )
    for label, rule, loads, up, turn in settings:
        yield Case(f"{label}: {loads}, up {up}, turn {turn}", (loads, up, turn), _picked(loads, up, turn), rule)


CHECKS = [
    Check(
        name="read_stream",
        lesson=LESSON,
        task="Return the text of a completion's stream, given as a list of bytes as they came off the socket: the text "
        "of each event's first choice, joined, up to [DONE].",
        lesson_learnt="TCP has no messages: events end at a blank line, and not where a read ends.",
        cases=_stream_cases,
        hints=(
            "Join all the pieces before you look at them, and only then decode to text: b''.join(pieces).decode().",
            "Events end with a blank line: split at '\\n\\n'; those that do not begin with 'data: ' are no events.",
            "json.loads(event[6:])['choices'] may be empty; stop at 'data: [DONE]'.",
        ),
    ),
    Check(
        name="counter_increase",
        lesson=LESSON,
        task="Return by how much a counter has grown over its values in the order of time. It only grows, but for "
        "restarts, at which it begins at 0 again.",
        lesson_learnt="That is Prometheus' increase(); rate() is the same by the seconds of the window.",
        cases=_counter_cases,
        hints=(
            "Look at neighbours: from one value to the next it grows by their difference.",
            "If the next one is smaller there was a restart, and since then it has grown by its whole value.",
            "sum(after - before if after >= before else after for before, after in pairwise(values)).",
        ),
    ),
    Check(
        name="p_from_buckets",
        lesson=LESSON,
        task="Return the quantile `share` of a histogram: buckets is a list of (upper bound, how many were not above "
        "it), the last bound is math.inf. Within a bucket, go along a straight line; beyond the last finite bound, "
        "return that bound.",
        lesson_learnt="A p99 is as exact as its bucket is narrow: choose bounds where your limits are.",
        cases=_bucket_cases,
        hints=(
            "The rank you look for is share · (the last count). Find the first bucket whose count reaches it.",
            "Keep the bound and the count of the bucket before; before the first one they are 0 and 0.",
            "low + (bound - low) · (rank - below) / (count - below), or low if bound is math.inf.",
        ),
        rtol=1e-9,
    ),
    Check(
        name="pick_replica",
        lesson=LESSON,
        task="Return the index of the replica that gets the next request: of those that are up, the one with the "
        "fewest in flight; of several, the first from index `turn` on, going around. -1 if none is up.",
        lesson_learnt="That is nginx's least_conn, with its passive health check.",
        cases=_pick_cases,
        hints=(
            "candidates = [i for i, alive in enumerate(up) if alive]; without any, return -1.",
            "min(candidates, key=…) with a key of two parts: (in_flight[i], how far i is from the turn).",
            "How far: (i - turn) % len(in_flight).",
        ),
    ),
]
