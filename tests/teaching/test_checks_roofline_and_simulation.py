"""Lesson 12's checks: the right answers pass, and each known-wrong one is rejected."""

import math

import pytest

from vllm_teach.teaching import check


def decode_bytes(layers, matrices, kv_width, contexts, size, *, new=1, sides=2, batch=False, cache_layers=True):
    weights = sum(rows * columns for rows, columns in matrices) * (max(1, len(contexts)) if batch else 1)
    cache = sides * kv_width * sum(context + new for context in contexts)
    return (layers * weights + (layers if cache_layers else 1) * cache) * size


def busy_shares(flops, num_bytes, peak, bandwidth):
    arithmetic, memory = flops / peak, num_bytes / bandwidth
    return arithmetic / max(arithmetic, memory), memory / max(arithmetic, memory)


def by_ridge(flops, num_bytes, peak, bandwidth):
    position = flops / num_bytes / (peak / bandwidth)
    return min(1.0, position), 1.0 if position <= 1 else 1 / position


def paying_batch(peak, bandwidth, bits, *, flops=2, rounding=math.ceil, bits_a_byte=8):
    return max(1, rounding(peak * bits / (bits_a_byte * flops * bandwidth)))


def replicas_for(trials, limit, demand, *, order=sorted, rounding=math.ceil, kept=lambda p99, limit: p99 <= limit):
    rate = None
    for each, p99 in order(trials):
        if not kept(p99, limit):
            break
        rate = each
    return rounding(demand / rate) if rate else math.inf


def lucky(trials, limit, demand):
    kept = [rate for rate, p99 in trials if p99 <= limit]
    return math.ceil(demand / max(kept)) if kept else math.inf


RIGHT = {
    "decode_bytes": [decode_bytes],
    "busy_shares": [busy_shares, by_ridge, lambda *a: list(busy_shares(*a))],
    "paying_batch": [paying_batch],
    "replicas_for": [replicas_for],
}
WRONG = {
    "decode_bytes": {
        "weights for each sequence": lambda *a: decode_bytes(*a, batch=True),
        "the new token not written": lambda *a: decode_bytes(*a, new=0),
        "the new token not read": lambda n, m, w, c, s: decode_bytes(n, m, w, [each - 1 for each in c], s),
        "K alone": lambda *a: decode_bytes(*a, sides=1),
        "one layer's cache": lambda *a: decode_bytes(*a, cache_layers=False),
        "weights alone": lambda n, m, w, c, s: decode_bytes(n, m, w, [], s),
        "the cache alone": lambda n, m, w, c, s: decode_bytes(n, [], w, c, s),
        "numbers, not bytes": lambda n, m, w, c, s: decode_bytes(n, m, w, c, 1),
        "always two bytes": lambda n, m, w, c, s: decode_bytes(n, m, w, c, 2),
        "the longest context for all": lambda n, m, w, c, s: decode_bytes(n, m, w, [max(c, default=0)] * len(c), s),
        "as wide as the model": lambda n, m, w, c, s: decode_bytes(n, m, m[0][1] if m else w, c, s),
    },
    "busy_shares": {
        "the other way round": lambda *a: busy_shares(*a)[::-1],
        "of the sum": lambda f, b, p, w: (f / p / (f / p + b / w), b / w / (f / p + b / w)),
        "seconds": lambda f, b, p, w: (f / p, b / w),
        "always limited by memory": lambda f, b, p, w: (f / p / (b / w), 1.0),
        "always limited by arithmetic": lambda f, b, p, w: (1.0, b / w / (f / p) if f else 0.0),
        "both busy": lambda *a: (1.0, 1.0),
        "one alone": lambda *a: busy_shares(*a)[0],
        "a side and no share": lambda f, b, p, w: (1.0, 0.0) if f / b > p / w else (0.0, 1.0),
        "not capped": lambda f, b, p, w: (f / b / (p / w), 1.0),
    },
    "paying_batch": {
        "one FLOP a weight": lambda *a: paying_batch(*a, flops=1),
        "rounded down": lambda *a: paying_batch(*a, rounding=math.floor),
        "one too many": lambda *a: paying_batch(*a, rounding=lambda x: math.floor(x) + 1),
        "bits for bytes": lambda *a: paying_batch(*a, bits_a_byte=1),
        "16 bits always": lambda p, w, b: paying_batch(p, w, 16),
        "the ridge": lambda p, w, b: p / w,
        "fewer bits need more": lambda p, w, b: paying_batch(p, w, 256 / b),
        "to the nearest": lambda *a: paying_batch(*a, rounding=round),
        "none": lambda p, w, b: paying_batch(p, w, b) - 1,
    },
    "replicas_for": {
        "the order of the list": lambda *a: replicas_for(*a, order=list),
        "above a miss, a lucky one": lucky,
        "rounded down": lambda *a: replicas_for(*a, rounding=lambda x: max(1, math.floor(x))),
        "one in reserve": lambda *a: replicas_for(*a, rounding=lambda x: math.floor(x) + 1),
        "not rounded": lambda *a: replicas_for(*a, rounding=lambda x: x),
        "below the limit, not on it": lambda *a: replicas_for(*a, kept=lambda p99, limit: p99 < limit),
        "the first that missed": lambda t, most, d: math.ceil(d / min([r for r, p in t if p > most] or [1])),
        "the highest rate": lambda t, most, d: math.ceil(d / max(r for r, _ in t)),
        "one if none is kept": lambda *a: 1 if replicas_for(*a) == math.inf else replicas_for(*a),
        "sorted in place": lambda t, most, d: (t.sort(), replicas_for(t, most, d))[1],
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for answer in RIGHT[name]:
        result = getattr(check, name)(answer)
        assert result.solved, result


@pytest.mark.parametrize(("name", "mutant"), [(name, mutant) for name in WRONG for mutant in WRONG[name]])
def test_wrong(name, mutant, capsys):
    result = getattr(check, name)(WRONG[name][mutant])
    assert result.status in ("wrong", "error"), mutant
    assert "Hint" in capsys.readouterr().out
