import math
import random
from dataclasses import dataclass

import pytest
import torch

from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.tiled import flash_attention_forward
from vllm_teach.errors import InvalidArgumentError


@dataclass(frozen=True)
class Case:
    seed: int
    batch: int
    q_len: int
    kv_len: int
    heads: tuple[int, int]
    head_dim: int
    causal: bool
    tile_q: int
    tile_k: int

    def __str__(self) -> str:
        heads = "x".join(map(str, self.heads))
        causal = "causal" if self.causal else "full"
        return f"q{self.q_len}-k{self.kv_len}-h{heads}-d{self.head_dim}-t{self.tile_q}x{self.tile_k}-{causal}"


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    tile_q, tile_k = rng.choice([1, 7, 16, 32, 64]), rng.choice([1, 7, 16, 32, 64])
    # Lengths of 1, below a tile, and within one of a tile's edge are where loops go wrong.
    q_len = rng.choice([1, rng.randint(1, tile_q), 2 * tile_q + rng.randint(-1, 1), rng.randint(1, 150)])
    kv_len = rng.choice([1, q_len, rng.randint(1, tile_k), 2 * tile_k + rng.randint(-1, 1), rng.randint(1, 150)])
    heads = rng.choice([(1, 1), (2, 2), (9, 3), (4, 1)])
    head_dim = rng.choice([1, 8, 40, 64])
    return Case(seed, rng.randint(1, 2), q_len, kv_len, heads, head_dim, rng.random() < 0.6, tile_q, tile_k)


CASES = [random_case(seed) for seed in range(200)]


def draw(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    sizes = [(case.q_len, case.heads[0]), (case.kv_len, case.heads[1]), (case.kv_len, case.heads[1])]
    return [torch.randn(case.batch, n, h, case.head_dim, generator=generator).to(dtype) for n, h in sizes]


def tiled(case: Case, qkv: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attention_forward(*qkv, causal=case.causal, tile_q=case.tile_q, tile_k=case.tile_k)


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; both must be infinite in the same places, and nowhere NaN."""
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite)
    difference = (actual.double() - expected.double())[~infinite].abs()
    assert not difference.isnan().any()
    return difference.max().item() if difference.numel() else 0.0


def test_the_random_cases_cover_what_they_must():
    assert len(set(CASES)) == 200
    required = {
        "fully masked rows": lambda c: c.causal and c.q_len > c.kv_len,
        "fewer queries than keys, causal": lambda c: c.causal and c.q_len < c.kv_len,
        "square causal": lambda c: c.causal and c.q_len == c.kv_len > 1,
        "GQA 9/3": lambda c: c.heads == (9, 3),
        "one query": lambda c: c.q_len == 1 and c.kv_len > 1,
        "one key": lambda c: c.kv_len == 1 and c.q_len > 1,
        "below a tile": lambda c: c.q_len < c.tile_q and c.kv_len < c.tile_k,
        "one past a tile": lambda c: c.q_len % c.tile_q == 1 and c.q_len > c.tile_q > 1,
        "whole tiles": lambda c: c.q_len % c.tile_q == 0 and c.kv_len % c.tile_k == 0,
        "tiles of unequal sides": lambda c: c.tile_q != c.tile_k,
    }
    assert {name: sum(map(matches, CASES)) >= 4 for name, matches in required.items()} == dict.fromkeys(required, True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_equals_the_naive_one(case):
    qkv = draw(case, torch.float64)
    out, lse = tiled(case, qkv)
    expected_out, expected_lse = naive_attention(*qkv, causal=case.causal, return_lse=True)
    assert max_error(out, expected_out) <= 1e-10
    assert max_error(lse, expected_lse) <= 1e-10
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize("case", CASES, ids=str)
def test_low_precision_is_at_most_twice_as_wrong_as_the_plain_implementation(case):
    for dtype in (torch.float16, torch.bfloat16):
        qkv = draw(case, dtype)
        exact_out, exact_lse = naive_attention(*[t.double() for t in qkv], causal=case.causal, return_lse=True)
        plain_out, plain_lse = naive_attention(*qkv, causal=case.causal, return_lse=True)
        out, lse = tiled(case, qkv)
        assert max_error(out, exact_out) <= 2 * max_error(plain_out, exact_out) + 1e-5, dtype
        assert max_error(lse, exact_lse) <= 2 * max_error(plain_lse, exact_lse) + 1e-5, dtype
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_float32_is_close_to_float64(make_qkv):
    q, k, v = make_qkv(q_len=300, kv_len=300, head_dim=64)
    exact = naive_attention(q, k, v, causal=True)
    out, lse = flash_attention_forward(q.float(), k.float(), v.float(), causal=True)
    assert max_error(out, exact) <= 2e-6
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_the_default_scale_and_a_given_one(make_qkv):
    q, k, v = make_qkv(head_dim=8)
    torch.testing.assert_close(flash_attention_forward(q, k, v), flash_attention_forward(q, k, v, scale=8**-0.5))
    out, _ = flash_attention_forward(q, k, v, scale=0.0)
    torch.testing.assert_close(out, v.mean(dim=1, keepdim=True).expand_as(out))


def test_no_keys_and_no_queries(make_qkv):
    for causal in (False, True):
        q, k, v = make_qkv(q_len=3, kv_len=0)
        out, lse = flash_attention_forward(q, k, v, causal=causal)
        assert out.shape == q.shape
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        q, k, v = make_qkv(q_len=0, kv_len=3)
        out, lse = flash_attention_forward(q, k, v, causal=causal)
        assert out.shape == q.shape
        assert lse.shape == (2, 2, 0)


def test_inputs_that_are_views_are_neither_copied_wrongly_nor_changed(make_qkv):
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in make_qkv(q_len=20, kv_len=20))
    before = [t.clone() for t in (q, k, v)]
    out, _ = flash_attention_forward(q, k, v, causal=True, tile_q=8, tile_k=8)
    assert max_error(out, naive_attention(q, k, v, causal=True)) <= 1e-12
    assert out.is_contiguous()
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v), strict=True))


@pytest.mark.parametrize("magnitude", [1e4, 1e8])
def test_large_logits_stay_right(make_qkv, magnitude):
    q, k, v = make_qkv(q_len=40, kv_len=40, head_dim=16)
    q = q * magnitude
    exact = naive_attention(q, k, v, causal=True)
    out, lse = flash_attention_forward(q, k, v, causal=True, tile_q=16, tile_k=8)
    assert lse.abs().max() > magnitude / 2
    assert max_error(out, exact) <= 1e-10
    low, low_lse = flash_attention_forward(q.float(), k.float(), v.float(), causal=True, tile_q=16, tile_k=8)
    assert low.isfinite().all()
    assert low_lse.isfinite().all()


def test_float16_input_survives_where_the_plain_float16_computation_overflows():
    generator = torch.Generator().manual_seed(0)
    q = (40 + torch.randn(1, 20, 1, 64, generator=generator)).half()  # q . k is about 102,400; float16 ends at 65,504
    k = (40 + torch.randn(1, 20, 1, 64, generator=generator)).half()
    v = torch.randn(1, 20, 1, 64, generator=generator).half()
    assert naive_attention(q, k, v).isnan().any()
    out, lse = flash_attention_forward(q, k, v, tile_q=8, tile_k=8)
    exact, exact_lse = naive_attention(q.double(), k.double(), v.double(), return_lse=True)
    assert max_error(out, exact) <= 2e-2
    assert max_error(lse, exact_lse) <= 1e-2


def test_a_long_float16_sum_needs_float32_statistics():
    """The denominator of 8,192 equal scores is 8,192; counted up in float16 it would stick at 2,048 = 2,048 + 1."""
    q, k = torch.zeros(1, 1, 1, 8).half(), torch.zeros(1, 8192, 1, 8).half()
    v = torch.full((1, 8192, 1, 8), 3.0).half()
    out, lse = flash_attention_forward(q, k, v, tile_k=1)
    assert (out == 3).all()
    assert lse.item() == pytest.approx(math.log(8192), abs=1e-6)


def test_peak_memory_grows_linearly(peak_bytes, loglog_slope):
    lengths = [1024, 2048, 4096]
    peaks = []
    for n in lengths:
        q, k, v = (torch.randn(1, n, 1, 64) for _ in range(3))
        peaks.append(peak_bytes(lambda q=q, k=k, v=v: flash_attention_forward(q, k, v, causal=True)))
    slope = loglog_slope(lengths, peaks)
    print(f"tiled: {peaks} bytes at {lengths}, slope {slope:.2f}")
    assert slope <= 1.1
    # What must be there: out and lse in full. What may be there: a constant number of tiles.
    tiles = 16 * 128 * 128 * 4
    assert all(n * (64 + 1) * 4 <= peak <= n * (64 + 1) * 4 + tiles for n, peak in zip(lengths, peaks, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_measurement_shows_the_naive_ones_square(peak_bytes, loglog_slope, causal):
    lengths = [512, 1024, 2048]
    peaks = []
    for n in lengths:
        q, k, v = (torch.randn(1, n, 1, 64) for _ in range(3))
        peaks.append(peak_bytes(lambda q=q, k=k, v=v: naive_attention(q, k, v, causal=causal)))
    assert 1.8 <= loglog_slope(lengths, peaks) <= 2.1
    # S and P, and little else: a third matrix would be an accident of this implementation.
    assert all(2 * n * n * 4 <= peak < 3 * n * n * 4 for n, peak in zip(lengths, peaks, strict=True))


def test_grouped_heads_do_not_repeat_the_keys(peak_bytes):
    q, k, v = torch.randn(1, 64, 32, 16), torch.randn(1, 8192, 1, 16), torch.randn(1, 8192, 1, 16)
    repeated_keys = 32 * k.numel() * 4
    assert peak_bytes(lambda: flash_attention_forward(q, k, v)) < repeated_keys / 2


@pytest.mark.parametrize("tile", ["tile_q", "tile_k"])
@pytest.mark.parametrize("size", [0, -3, 1.5])
def test_a_tile_that_is_not_positive_is_refused(make_qkv, tile, size):
    with pytest.raises(InvalidArgumentError, match=f"{tile} is {size};"):
        flash_attention_forward(*make_qkv(), **{tile: size})
