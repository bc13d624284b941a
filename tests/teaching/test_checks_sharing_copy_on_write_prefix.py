"""Lesson 07's checks: the right answers pass, and each known-wrong one is rejected."""

import hashlib
import math

import pytest

from vllm_teach.teaching import check


def copies(tables, pinned, writer, first, count, size, *, pins=True, others=True, own=False, every=False, ahead=0):
    """The blocks to copy, with switches for what can go wrong."""
    positions = range(first + ahead, first + ahead + count)
    written = range(len(tables[writer])) if every else sorted({p // size for p in positions})
    found = []
    for i in written:
        if i >= len(tables[writer]):
            continue
        block = tables[writer][i]
        holders = sum(block in table for name, table in tables.items() if own or name != writer)
        if (others and holders > 0) or (pins and block in pinned):
            found.append(block)
    return found


def blocks(prompt, output, n, size):
    if not output:
        return math.ceil(prompt / size)
    return prompt // size + n * (math.ceil((prompt + output) / size) - prompt // size)


def digest(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def wide(tokens):
    return b"".join(token.to_bytes(8, "big") for token in tokens)


def keys(requests, size, *, link=digest, first=lambda salt: digest(b"salt", salt.encode()), partial=False):
    found = []
    for salt, tokens in requests:
        key, chain = first(salt), []
        for start in range(0, len(tokens) - (0 if partial else size - 1), size):
            key = link(key, wide(tokens[start : start + size]))
            chain.append(key)
        found.append(chain)
    return found


def keys_by_python(requests, size, of=lambda salt, before, block: (salt, *before, *block)):
    return [
        [of(salt, tokens[:i], tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        for salt, tokens in requests
    ]


def keys_per_request(requests, size):
    return [[(number, *key) for key in chain] for number, chain in enumerate(keys_by_python(requests, size))]


def keys_in_a_global_count(requests, size):
    return [[object() for _ in chain] for chain in keys_by_python(requests, size)]


def bonus(try_out):
    return lambda use: use.released + 60 * (use.uses > 1)


def found_by_trying(try_out):
    """Right: tries a few and takes the best worst case."""
    rules = [lambda use, k=k: use.released + k * math.log2(use.uses) for k in (0, 10, 20, 40)]
    return max(rules, key=lambda rule: min(mine / lru for lru, mine in try_out(rule).values()))


RIGHT = {
    "blocks_to_copy": [copies, lambda *a: tuple(copies(*a))],
    "blocks_for_samples": [blocks],
    "prefix_keys": [keys, keys_by_python],
    "better_than_lru": [bonus, found_by_trying],
}
WRONG = {
    "blocks_to_copy": {
        "always": lambda *a: copies(*a, own=True),
        "never": lambda *a: [],
        "every shared block": lambda *a: copies(*a, every=True),
        "pins forgotten": lambda *a: copies(*a, pins=False),
        "only pins": lambda *a: copies(*a, others=False),
        "one token too late": lambda *a: copies(*a, ahead=1),
        "one token too early": lambda *a: copies(*a, ahead=-1),
        "only the first block": lambda t, p, w, f, c, s: copies(t, p, w, f, min(c, 1), s),
        "also when nothing is written": lambda t, p, w, f, c, s: copies(t, p, w, f, max(c, 1), s),
        "the last token's block": lambda t, p, w, f, c, s: copies(t, p, w, f + c - 1, min(c, 1), s),
        "the last block of the table": lambda t, p, w, f, c, s: copies(t, p, w, s * (len(t[w]) - 1), 1, s),
        "logical blocks": lambda t, p, w, f, c, s: [t[w].index(b) for b in copies(t, p, w, f, c, s)],
        "backwards": lambda *a: copies(*a)[::-1],
        "how many": lambda *a: len(copies(*a)),
        "another sequence's table": lambda t, p, w, f, c, s: copies(t, p, "A", f, c, s),
        "tables changed": lambda t, p, w, f, c, s: (t.setdefault("Z", [0]), copies(t, p, w, f, c, s))[1],
    },
    "blocks_for_samples": {
        "nothing shared": lambda p, o, n, s: n * math.ceil((p + o) / s),
        "everything shared": lambda p, o, n, s: math.ceil((p + o) / s),
        "prompt rounded up": lambda p, o, n, s: math.ceil(p / s) + n * (math.ceil((p + o) / s) - math.ceil(p / s)),
        "prompt and outputs apart": lambda p, o, n, s: math.ceil(p / s) + n * math.ceil(o / s),
        "prompt rounded down, outputs apart": lambda p, o, n, s: p // s + n * math.ceil(o / s),
        "no write, but copies": lambda p, o, n, s: p // s + n * (math.ceil((p + o) / s) - p // s),
        "tokens": lambda p, o, n, s: p + n * o,
        "not rounded": lambda p, o, n, s: (p + n * o) / s,
        "the last copy too": lambda p, o, n, s: blocks(p, o, n, s) + (p % s > 0),
        "the last token not stored": lambda p, o, n, s: blocks(p, max(o - 1, 0), n, s),
        "one sample more": lambda p, o, n, s: blocks(p, o, n + 1, s),
    },
    "prefix_keys": {
        "tokens alone": lambda r, s: keys(r, s, link=lambda parent, block: digest(block)),
        "no salt": lambda r, s: keys(r, s, first=lambda salt: b""),
        "salt in the first block, no chain": lambda r, s: keys_by_python(r, s, lambda salt, a, b: (salt, *b)),
        "tokens and position": lambda r, s: keys_by_python(r, s, lambda salt, a, b: (salt, len(a), *b)),
        "tokens and the parent's tokens": lambda r, s: keys_by_python(r, s, lambda salt, a, b: (salt, *a[-s:], *b)),
        "a sum of the keys": lambda r, s: keys(
            r, s, link=lambda x, b: (int.from_bytes(x, "big") ^ int.from_bytes(digest(b), "big")).to_bytes(32, "big")
        ),
        "the order left out": lambda r, s: keys_by_python(r, s, lambda salt, a, b: (salt, *a, *sorted(b))),
        "the parents' order left out": lambda r, s: keys_by_python(r, s, lambda salt, a, b: (salt, *sorted(a), *b)),
        "digits run together": lambda r, s: keys_by_python(
            r, s, lambda salt, a, b: (salt, "".join(map(str, [*a, *b])))
        ),
        "salt runs into tokens": lambda r, s: keys_by_python(
            r, s, lambda salt, a, b: ",".join([salt, *map(str, [*a, *b])]).replace(",", "", 1)
        ),
        "Python's hash": lambda r, s: keys_by_python(r, s, lambda salt, a, b: hash((salt, *a, *b))),
        "16 bits": lambda r, s: [[key[:2] for key in chain] for chain in keys(r, s)],
        "a partial block as well": lambda r, s: keys(r, s, partial=True),
        "a key per request": keys_per_request,
        "a key per call": keys_in_a_global_count,
        "lists as keys": lambda r, s: keys_by_python(r, s, lambda salt, a, b: [salt, *a, *b]),
        "one key a request": lambda r, s: [chain[-1:] for chain in keys(r, s)],
        "one list for all": lambda r, s: [key for chain in keys(r, s) for key in chain],
        "low bytes of a token": lambda r, s: keys_by_python(
            r, s, lambda salt, a, b: (salt, *(token % 256 for token in (*a, *b)))
        ),
    },
    "better_than_lru": {
        "lru": lambda try_out: lambda use: use.released,
        "fifo": lambda try_out: lambda use: use.inserted,
        "lfu": lambda try_out: lambda use: (use.uses, use.released),
        "lfu without ties": lambda try_out: lambda use: use.uses,
        "used twice first": lambda try_out: lambda use: (use.uses > 1, use.released),
        "most recently used": lambda try_out: lambda use: -use.released,
        "most used": lambda try_out: lambda use: -use.uses,
        "a bonus far too large": lambda try_out: lambda use: use.released + 10_000 * use.uses,
        "a bonus far too small": lambda try_out: lambda use: use.released + 0.5 * (use.uses > 1),
        "a rank, not a rule": lambda try_out: 3,
        "the hits": lambda try_out: try_out(lambda use: use.released),
        "two arguments": lambda try_out: lambda use, now: use.released,
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for function in RIGHT[name]:
        result = getattr(check, name)(function)
        assert result.solved, result.message


@pytest.mark.parametrize(("name", "mistake"), [(name, mistake) for name in WRONG for mistake in WRONG[name]])
def test_wrong(name, mistake):
    result = getattr(check, name)(WRONG[name][mistake])
    assert result.status in ("wrong", "error"), result.message
    assert "\nHint " in result.message


def test_what_is_asked_for_cannot_be_had_from_recency_or_frequency_alone():
    (try_out,) = check.better_than_lru.cases()[0].arguments
    lfu = try_out(lambda use: (use.uses, use.released))
    assert lfu["steady"][1] > 1.1 * lfu["steady"][0]
    assert lfu["moody"][1] < lfu["moody"][0]
