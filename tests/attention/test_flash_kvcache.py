import inspect
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_teach.attention.flash_kvcache import flash_attn_with_kvcache
from vllm_teach.attention.reference import naive_attention


@dataclass
class Call:
    """One call's arguments in float64, and the numbers in them as Python objects, for the reference."""

    tensors: dict[str, torch.Tensor]
    filled: list[int]
    leftpad: list[int]
    tables: list[list[int]]  # of a dense cache: one block, which is the row
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {name: t.clone() for name, t in self.tensors.items()} | self.options

    @property
    def block_size(self) -> int:
        return self.tensors["k_cache"].shape[1]


def turned(vector: list[float], cos: list[float], sin: list[float], interleaved: bool) -> list[float]:
    """Rotary embedding of one head as products of complex numbers."""
    result = list(vector)
    pairs = len(cos)
    for p in range(pairs):
        first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + pairs)
        number = complex(vector[first], vector[second]) * complex(cos[p], sin[p])
        result[first], result[second] = number.real, number.imag
    return result


def reference(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, k_cache, v_cache) with Python numbers and loops, one slot and one key at a time."""
    options = call.options
    k_cache, v_cache = call.tensors["k_cache"].clone(), call.tensors["v_cache"].clone()
    q = call.tensors["q"].clone()
    batch, q_len, q_heads, head_dim = q.shape
    new_len = call.tensors["k"].shape[1] if "k" in call.tensors else 0
    causal, (left, right) = options.get("causal", False), options.get("window_size", (-1, -1))
    scale = options.get("softmax_scale") or head_dim**-0.5
    cos, sin = (call.tensors[name].tolist() if name in call.tensors else None for name in ("rotary_cos", "rotary_sin"))
    interleaved = options.get("rotary_interleaved", True)

    def where(b: int, slot: int) -> tuple[int, int]:
        return call.tables[b][slot // call.block_size], slot % call.block_size

    for b in range(batch):
        for j in range(new_len):
            slot = call.filled[b] + j
            for h in range(k_cache.shape[2]):
                vector = call.tensors["k"][b, j, h].tolist()
                if cos is not None:
                    vector = turned(vector, cos[slot], sin[slot], interleaved)
                k_cache[(*where(b, slot), h)] = torch.tensor(vector, dtype=q.dtype)
                v_cache[(*where(b, slot), h)] = call.tensors["v"][b, j, h]

    out = torch.zeros_like(q)
    lse = torch.full((batch, q_heads, q_len), -math.inf, dtype=q.dtype)
    for b in range(batch):
        slots = range(call.leftpad[b], call.filled[b] + new_len)
        for h in range(q_heads):
            g = h // (q_heads // k_cache.shape[2])
            slope = 0.0
            if "alibi_slopes" in call.tensors:
                slopes = call.tensors["alibi_slopes"]
                slope = float(slopes[b, h] if slopes.dim() == 2 else slopes[h])
            for i in range(q_len):
                query = q[b, i, h].tolist()
                if cos is not None:
                    ordered = causal or (left, right) != (-1, -1)
                    position = call.filled[b] + (i if ordered else 0)
                    query = turned(query, cos[position], sin[position], interleaved)
                own = i + len(slots) - q_len
                scores, values = [], []
                for j, slot in enumerate(slots):
                    if (causal and j > own) or (left >= 0 and j < own - left) or (right >= 0 and j > own + right):
                        continue
                    key = k_cache[(*where(b, slot), g)].tolist()
                    score = scale * sum(x * y for x, y in zip(query, key, strict=True))
                    if cap := options.get("softcap", 0.0):
                        score = cap * math.tanh(score / cap)
                    scores.append(score - slope * abs(own - j))
                    values.append(v_cache[(*where(b, slot), g)])
                if scores:
                    weights = [math.exp(score) for score in scores]
                    lse[b, h, i] = math.log(sum(weights))
                    out[b, i, h] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
    return out, lse, k_cache, v_cache


def random_call(seed: int) -> Call:
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    batch, q_len, new_len = rng.randint(1, 3), rng.randint(1, 4), rng.randint(0, 4)
    q_heads, kv_heads, head_dim = *rng.choice([(2, 2), (4, 2), (3, 1)]), rng.choice([4, 6])
    filled = [rng.choice([0, 1, rng.randint(2, 20)]) for _ in range(batch)]
    leftpad = [rng.randint(0, n) if rng.random() < 0.5 else 0 for n in filled]
    options: dict[str, Any] = {"causal": rng.random() < 0.5, "rotary_interleaved": rng.random() < 0.5}
    options["window_size"] = rng.choice([(-1, -1), (-1, -1), (3, 0), (2, 1), (-1, 2)])
    options |= {"softmax_scale": rng.choice([None, 0.4]), "softcap": rng.choice([0.0, 2.0])}
    options |= {"num_splits": rng.choice([0, 1, 2, 50]), "return_softmax_lse": True}

    tensors: dict[str, torch.Tensor] = {"q": draw(batch, q_len, q_heads, head_dim)}
    if seed % 2:
        block_size = rng.choice([1, 3, 16, 256])
        counts = [-(-(n + new_len) // block_size) for n in filled]
        free = list(range(sum(counts) + 3))
        rng.shuffle(free)
        tables = [[free.pop() for _ in range(count)] for count in counts]
        width = max(counts) + 1
        padded = [table + [rng.choice([-7, 10**6])] * (width - len(table)) for table in tables]
        tensors["block_table"] = torch.tensor(padded, dtype=torch.int32)
        rows = sum(counts) + 3
    else:
        block_size, rows = max(filled) + new_len + rng.randint(0, 3), batch + 2
        tables = [[b] for b in range(batch)]
        if rng.random() < 0.5:
            tables = [[row] for row in rng.sample(range(rows), batch)]
            tensors["cache_batch_idx"] = torch.tensor(tables, dtype=torch.int32).flatten()
    # What no sequence has written is NaN, and so is the left padding.
    for name in ("k_cache", "v_cache"):
        cache = torch.full((rows, block_size, kv_heads, head_dim), math.nan, dtype=torch.float64)
        for b in range(batch):
            for slot in range(leftpad[b], filled[b]):
                cache[tables[b][slot // block_size], slot % block_size] = draw(kv_heads, head_dim)
        tensors[name] = cache
    tensors["cache_seqlens"] = torch.tensor(filled, dtype=torch.int32)
    if any(leftpad):
        tensors["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    if rng.random() < 0.75:
        tensors |= {"k": draw(batch, new_len, kv_heads, head_dim), "v": draw(batch, new_len, kv_heads, head_dim)}
        if rng.random() < 0.6:
            angles = draw(max(filled) + max(q_len, new_len), rng.choice([1, 2]))
            tensors |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    if rng.random() < 0.4:
        tensors["alibi_slopes"] = torch.rand(rng.choice([(q_heads,), (batch, q_heads)]))
    return Call(tensors, filled, leftpad, tables, options)


CALLS = [random_call(seed) for seed in range(80)]


def test_the_random_calls_cover_what_they_must():
    required = {
        "nothing to append": lambda c: "k" not in c.tensors,
        "append": lambda c: "k" in c.tensors and c.tensors["k"].shape[1] > 1,
        "other lengths of k and q": lambda c: "k" in c.tensors and c.tensors["k"].shape[1] != c.tensors["q"].shape[1],
        "blocks of 1": lambda c: "block_table" in c.tensors and c.block_size == 1,
        "blocks of 3": lambda c: "block_table" in c.tensors and c.block_size == 3,
        "blocks of 256": lambda c: "block_table" in c.tensors and c.block_size == 256,
        "append across blocks": lambda c: "k" in c.tensors and any(len(t) > 1 for t in c.tables) and c.block_size > 1,
        "more queries than keys": lambda c: c.options["causal"] and 0 in c.filled and "k" not in c.tensors,
        "leftpad in blocks": lambda c: "block_table" in c.tensors and "cache_leftpad" in c.tensors,
        "rows by index": lambda c: "cache_batch_idx" in c.tensors,
        "rotary, causal": lambda c: "rotary_cos" in c.tensors and c.options["causal"],
        "rotary, all at one position": lambda c: (
            "rotary_cos" in c.tensors and not c.options["causal"] and c.options["window_size"] == (-1, -1)
        ),
        "rotary of halves": lambda c: "rotary_cos" in c.tensors and not c.options["rotary_interleaved"],
        "slopes per sequence": lambda c: "alibi_slopes" in c.tensors and c.tensors["alibi_slopes"].dim() == 2,
    }
    counts = {name: sum(map(matches, CALLS)) for name, matches in required.items()}
    assert min(counts.values()) >= 3, counts


@pytest.mark.parametrize("seed", range(len(CALLS)))
def test_it_does_what_the_loops_do(seed):
    call = CALLS[seed]
    arguments = call.arguments()
    out, lse = flash_attn_with_kvcache(**arguments)
    expected_out, expected_lse, k_cache, v_cache = reference(call)
    for actual, expected in (
        (out, expected_out),
        (lse, expected_lse),
        (arguments["k_cache"], k_cache),
        (arguments["v_cache"], v_cache),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11, equal_nan=True)
    assert not out.isnan().any()
    changed = [n for n, t in call.tensors.items() if "cache" not in n[1:] and not torch.equal(arguments[n], t)]
    assert changed == []


def test_the_signature_is_flash_attentions():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    empty = inspect.Parameter.empty
    assert [(p.name, p.default) for p in parameters] == [
        ("q", empty),
        ("k_cache", empty),
        ("v_cache", empty),
        ("k", None),
        ("v", None),
        ("rotary_cos", None),
        ("rotary_sin", None),
        ("cache_seqlens", None),
        ("cache_batch_idx", None),
        ("cache_leftpad", None),
        ("block_table", None),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
    ]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_decoding_token_by_token_is_one_causal_attention(make_qkv):
    q, k, v = make_qkv(q_len=20, kv_len=20, q_heads=4, kv_heads=2)
    expected = naive_attention(q, k, v, causal=True)
    table = torch.randperm(18)[:14].view(2, 7).int()
    cache = torch.full((2, 18, 3, 2, 8), math.nan, dtype=torch.float64)  # k and v, 18 blocks of 3
    done = 0
    for step in (5, 1, 1, 4, 9):  # a prefill, two decode steps, two chunks
        now = slice(done, done + step)
        out = flash_attn_with_kvcache(
            q[:, now], cache[0], cache[1], k[:, now], v[:, now], cache_seqlens=done, block_table=table, causal=True
        )
        torch.testing.assert_close(out, expected[:, now], rtol=0, atol=1e-12)
        done += step


def test_the_whole_cache_is_read_without_cache_seqlens(make_qkv):
    q, k, v = make_qkv(q_len=1, kv_len=12)
    expected = naive_attention(q, k, v)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v), expected, rtol=0, atol=1e-13)
    blocks = [t.reshape(6, 4, 2, 8) for t in (k, v)]
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    torch.testing.assert_close(flash_attn_with_kvcache(q, *blocks, block_table=table), expected, rtol=0, atol=1e-13)


def test_an_int_is_the_length_of_all_sequences(make_qkv):
    q, k, v = make_qkv(q_len=1, kv_len=12)
    one = flash_attn_with_kvcache(q, k, v, cache_seqlens=5)
    both = flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([5, 5], dtype=torch.int32))
    assert torch.equal(one, both)
    index = torch.tensor([1], dtype=torch.int32)  # FlashAttention would want one length per row of the cache
    assert torch.equal(flash_attn_with_kvcache(q[1:], k, v, cache_seqlens=5, cache_batch_idx=index), one[1:])


def test_sequences_that_share_a_row_read_the_last_one_written():
    q, k, v = (torch.randn(2, 1, 1, 4, dtype=torch.float64) for _ in range(3))
    k_cache, v_cache = (torch.zeros(3, 2, 1, 4, dtype=torch.float64) for _ in range(2))
    rows = torch.tensor([2, 2], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, cache_batch_idx=rows)
    assert torch.equal(k_cache[2, 0], k[1, 0])
    torch.testing.assert_close(out, v[1:].expand(2, 1, 1, 4), rtol=0, atol=0)
    # Reading alone: a prompt that two sequences share.
    q = torch.randn(2, 1, 1, 4, dtype=torch.float64)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=2, cache_batch_idx=rows)
    torch.testing.assert_close(out[:1], flash_attn_with_kvcache(q[:1], k_cache[2:], v_cache[2:]), rtol=0, atol=1e-15)


def test_a_block_twice_in_a_table_keeps_the_last_key_written():
    k, v = (torch.randn(1, 4, 1, 4, dtype=torch.float64) for _ in range(2))
    k_cache, v_cache = (torch.zeros(2, 2, 1, 4, dtype=torch.float64) for _ in range(2))
    table = torch.tensor([[1, 1]], dtype=torch.int32)
    flash_attn_with_kvcache(k, k_cache, v_cache, k, v, cache_seqlens=0, block_table=table)
    assert torch.equal(k_cache[1], k[0, 2:])
    assert (k_cache[0] == 0).all()


def test_a_cache_that_is_a_view_is_written_in_place():
    storage = torch.zeros(4, 2, 5, 1, 8, dtype=torch.float64)  # [blocks, k and v, slots, heads, head_dim]
    q, k, v = (torch.randn(1, 7, 1, 8, dtype=torch.float64) for _ in range(3))
    table = torch.tensor([[3, 0]], dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q, storage[:, 0], storage[:, 1], k, v, cache_seqlens=0, block_table=table, causal=True
    )
    assert torch.equal(storage[3, 0], k[0, :5])
    assert torch.equal(storage[0, 1, :2], v[0, 5:])
    assert (storage[1:3] == 0).all()
    torch.testing.assert_close(out, naive_attention(q, k, v, causal=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_low_precision_keeps_flash_attentions_rule(make_qkv, dtype, num_splits):
    q, k, v = make_qkv(q_len=3, kv_len=600, q_heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    exact = naive_attention(q.double(), k.double(), v.double(), causal=True)
    plain = naive_attention(q, k, v, causal=True)
    out, lse = flash_attn_with_kvcache(q, k, v, causal=True, num_splits=num_splits, return_softmax_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 1e-5


def test_empty_batches_queries_and_caches():
    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    out, lse = flash_attn_with_kvcache(empty(0, 1, 2, 4), empty(0, 3, 2, 4), empty(0, 3, 2, 4), return_softmax_lse=True)
    assert (out.shape, lse.shape) == ((0, 1, 2, 4), (0, 2, 1))
    out, lse = flash_attn_with_kvcache(empty(2, 0, 2, 4), empty(2, 3, 2, 4), empty(2, 3, 2, 4), return_softmax_lse=True)
    assert (out.shape, lse.shape) == ((2, 0, 2, 4), (2, 2, 0))
    for splits in (1, 3):
        out, lse = flash_attn_with_kvcache(
            empty(2, 1, 2, 4), empty(2, 0, 2, 4), empty(2, 0, 2, 4), num_splits=splits, return_softmax_lse=True
        )
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_new_tokens_may_be_views_of_the_cache_they_are_written_to(make_qkv):
    """They are what the cache held before the call, though writing them changes it."""
    _, k_cache, v_cache = make_qkv(kv_len=12)
    before = k_cache.clone(), v_cache.clone()
    apart = [x.clone() for x in (k_cache[:, 3:4], k_cache, v_cache, k_cache[:, 2:6], v_cache[:, 4:8])]
    want = flash_attn_with_kvcache(*apart, cache_seqlens=3, causal=True)
    q, k, v = k_cache[:, 3:4], k_cache[:, 2:6], v_cache[:, 4:8]
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=True), want)
    assert torch.equal(k_cache[:, 3:7], before[0][:, 2:6])
    assert torch.equal(v_cache[:, 3:7], before[1][:, 4:8])
