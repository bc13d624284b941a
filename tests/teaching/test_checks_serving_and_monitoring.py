"""Lesson 11's checks: the right answers pass, and each known-wrong one is rejected."""

import json
import math
from bisect import bisect_left
from itertools import pairwise

import pytest

from vllm_teach.teaching import check


def read_stream(pieces, *, join=True, comments=True, choices=True, done=True, last=False):
    text = b"".join(pieces).decode() if join else "".join(piece.decode(errors="replace") for piece in pieces)
    found = ""
    for event in text.split("\n\n"):
        if event == "data: [DONE]":
            if done:
                break
            continue
        if not event.startswith("data: "):
            if not comments and event:
                raise ValueError(event)
            continue
        listed = json.loads(event[6:])["choices"]
        if listed or not choices:
            found = listed[0]["text"] if last else found + listed[0]["text"]
    return found


def event_by_event(pieces):
    """One that keeps what is incomplete, as a client does that cannot wait for the end."""
    found, buffer = "", b""
    for piece in pieces:
        buffer += piece
        while b"\n\n" in buffer:
            event, buffer = buffer.split(b"\n\n", 1)
            if event == b"data: [DONE]":
                return found
            if event.startswith(b"data: "):
                found += "".join(choice["text"] for choice in json.loads(event[6:].decode())["choices"][:1])
    return found


def a_piece_an_event(pieces):
    return "".join(read_stream([piece]) for piece in pieces)


def at_each_line(pieces):
    lines = [line for line in b"".join(pieces).decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line[6:])["choices"])


def counter_increase(values):
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def p_from_buckets(buckets, share, *, line=True, below=True, first=0.0, beyond=None, step=True):
    rank = share * buckets[-1][1]
    low, under = first, 0.0
    for bound, count in buckets:
        if count >= rank and (count > under or not step):
            if math.isinf(bound):
                return low if beyond is None else beyond
            if not line:
                return bound
            return low + (bound - low) * (rank - (under if below else 0.0)) / (count - under)
        low, under = bound, count
    return low


def by_bisection(buckets, share):
    counts = [count for _, count in buckets]
    place = bisect_left(counts, share * counts[-1])
    low, under = buckets[place - 1] if place else (0.0, 0.0)
    bound, count = buckets[place]
    return low if math.isinf(bound) else low + (bound - low) * (share * counts[-1] - under) / (count - under)


def pick_replica(in_flight, up, turn, *, health=True, turns=True, around=True):
    candidates = [i for i in range(len(in_flight)) if up[i] or not health]
    if not candidates:
        return -1

    def key(i):
        far = (i - turn) % len(in_flight) if around else abs(i - turn)
        return (in_flight[i], far if turns else 0)

    return min(candidates, key=key)


def the_next_that_is_up(in_flight, up, turn):
    count = len(in_flight)
    return next((i % count for i in range(turn, turn + count) if up[i % count]), -1)


def best_or_nothing(in_flight, up, turn):
    best = pick_replica(in_flight, up, turn, health=False)
    return best if up[best] else -1


RIGHT = {
    "read_stream": [read_stream, event_by_event],
    "counter_increase": [counter_increase],
    "p_from_buckets": [p_from_buckets, by_bisection],
    "pick_replica": [pick_replica],
}
WRONG = {
    "read_stream": {
        "decoded piece by piece": lambda p: read_stream(p, join=False),
        "a piece is an event": a_piece_an_event,
        "comments are events": lambda p: read_stream(p, comments=False),
        "every event has a choice": lambda p: read_stream(p, choices=False),
        "reads on after the end": lambda p: read_stream(p, done=False),
        "reads on after the end, by lines": at_each_line,
        "the last event only": lambda p: read_stream(p, last=True),
        "bytes": lambda p: read_stream(p).encode(),
        "stripped": lambda p: " ".join(read_stream(p).split()),
        "with the marker": lambda p: read_stream(p) + "[DONE]",
    },
    "counter_increase": {
        "last minus first": lambda v: v[-1] - v[0],
        "the last value": lambda v: v[-1],
        "highest minus lowest": lambda v: max(v) - min(v),
        "a restart adds nothing": lambda v: sum(max(0.0, b - a) for a, b in pairwise(v)),
        "absolute differences": lambda v: sum(abs(b - a) for a, b in pairwise(v)),
        "a standstill is a restart": lambda v: sum(b - a if b > a else b for a, b in pairwise(v)),
        "the first value is growth": lambda v: v[0] + counter_increase(v),
        "a mean": lambda v: counter_increase(v) / len(v),
    },
    "p_from_buckets": {
        "the bucket's upper bound": lambda b, s: p_from_buckets(b, s, line=False),
        "counts taken as not cumulative": lambda b, s: p_from_buckets(b, s, below=False),
        "begins at the first bound": lambda b, s: p_from_buckets(b, s, first=b[0][0]),
        "infinity": lambda b, s: p_from_buckets(b, s, beyond=math.inf),
        "1 minus the share": lambda b, s: p_from_buckets(b, 1 - s),
        "the bucket's middle": lambda b, s: (lambda high: (high + max([x for x, _ in b if x < high], default=0.0)) / 2)(
            p_from_buckets(b, s, line=False)
        ),
        "a percentage": lambda b, s: p_from_buckets(b, s) * 100,
        "the last finite bound": lambda b, s: b[-2][0],
        "of the finite buckets": lambda b, s: p_from_buckets([*b[:-1], (math.inf, b[-2][1])], s),
    },
    "pick_replica": {
        "the dead, too": lambda *a: pick_replica(*a, health=False),
        "the first of equals": lambda *a: pick_replica(*a, turns=False),
        "not around": lambda *a: pick_replica(*a, around=False),
        "round robin": lambda f, u, t: t % len(f),
        "round robin of those up": the_next_that_is_up,
        "the busiest": lambda f, u, t: pick_replica([-x for x in f], u, t),
        "no second choice": best_or_nothing,
        "the load, not the place": lambda f, u, t: f[pick_replica(f, u, t)],
        "the last one for nobody": lambda f, u, t: pick_replica(f, u, t) % len(f),
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for answer in RIGHT[name]:
        result = getattr(check, name)(answer)
        assert result.solved, result


@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(name, a, id=f"{name}: {what}") for name, wrong in WRONG.items() for what, a in wrong.items()],
)
def test_wrong(name, answer):
    result = getattr(check, name)(answer)
    assert result.status in ("wrong", "error")
    assert "Rule: " in result.message or result.status == "error"
