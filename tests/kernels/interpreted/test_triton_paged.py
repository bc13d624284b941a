"""The paged kernel: any block size, any number of splits, and nothing read that no sequence owns."""

import pytest
import torch

from vllm_teach.attention.layout import Paged
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.sequencewise import attend_sequences
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kernels.triton_kernels.merge_splits import merge_splits, merge_splits_spec
from vllm_teach.kernels.triton_kernels.paged_decode import choose_splits, paged_attention, paged_attention_spec
from vllm_teach.kernels.triton_kernels.problem import Options
from vllm_teach.kernels.triton_kernels.tuning import Tile

KV_LENS = (37, 0, 50, 1)


def make_cache(kv_lens=KV_LENS, block_size=16, kv_heads=2, head_dim=24, dtype=torch.float32):
    """Caches of NaN, in which only the slots of `kv_lens` keys hold numbers, and a table with -1 behind them."""
    counts = [-(-n // block_size) for n in kv_lens]
    free = torch.randperm(sum(counts) + 2).tolist()
    caches = [torch.full((len(free), block_size, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in "kv"]
    table = torch.full((len(kv_lens), max(counts) + 1), -1, dtype=torch.int32)
    for i, n in enumerate(kv_lens):
        for b in range(counts[i]):
            table[i, b] = free.pop()
            used = min(block_size, n - b * block_size)
            for cache in caches:
                cache[table[i, b], :used] = torch.randn(used, kv_heads, head_dim).to(dtype)
    return *caches, table, torch.tensor(kv_lens, dtype=torch.int32)


def assert_attends(q, cache, q_lens, variant, options, rule, **how):
    cu_q = torch.tensor([0, *q_lens]).cumsum(0).int()
    out, lse = paged_attention(q, *cache, cu_q, options, q_len=max(q_lens), **how)
    layout = Paged(cu_q, cache[2], cache[3])
    exact = attend_sequences(naive_attention, q.double(), cache[0].double(), cache[1].double(), layout, **variant)
    rule(out, attend_sequences(naive_attention, q, *cache[:2], layout, **variant), exact)
    assert lse.shape == (q.shape[1], len(q))
    return lse


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_decode(block_size, splits, assert_by_the_rule):
    cache = make_cache(block_size=block_size)
    q = torch.randn(4, 6, 24)
    lse = assert_attends(q, cache, (1, 1, 1, 1), {}, Options(), assert_by_the_rule, splits=splits, tile=Tile(16, 16))
    assert (lse[:, 1] == -torch.inf).all()  # an empty sequence
    assert lse[:, [0, 2, 3]].isfinite().all()


VARIANTS = {
    "causal": {"causal": True},
    "window (9, 0)": {"window_size": (9, 0)},
    "window (5, 3)": {"window_size": (5, 3), "softcap": 2.0},
    "alibi": {"alibi_slopes": torch.rand(4, 4), "causal": True},
}


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_prefill_over_a_cache(variant, splits, options_of, assert_by_the_rule):
    q_lens = (20, 3, 9, 0)
    q = torch.randn(sum(q_lens), 4, 24)
    assert_attends(q, make_cache(), q_lens, variant, options_of(**variant), assert_by_the_rule, splits=splits)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (40, 2)], ids=str)
def test_head_groups_in_float16(heads, assert_by_the_rule):
    cache = make_cache(kv_heads=heads[1], dtype=torch.float16)
    q = torch.randn(4, heads[0], 24).half()
    assert_attends(q, cache, (1, 1, 1, 1), {}, Options(), assert_by_the_rule)


def test_the_lse_of_splits_is_that_of_one():
    cache, q = make_cache(), torch.randn(4, 4, 24)
    (one, lse_one), (many, lse_many) = (paged_attention(q, *cache, splits=n, tile=Tile(16, 16)) for n in (1, 5))
    torch.testing.assert_close(one, many, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse_one, lse_many, rtol=0, atol=1e-6)


def test_merging_is_its_specification():
    parts, lse = torch.randn(5, 7, 24), torch.randn(5, 7) * 3
    out, merged = torch.empty(7, 24), torch.empty(7)
    merge_splits(parts, lse, out, merged)
    expected, expected_lse = merge_splits_spec(parts, lse)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged, expected_lse, rtol=0, atol=1e-6)
    lse[:, 3], lse[1:, 4] = -torch.inf, -torch.inf
    merge_splits(parts, lse, out, merged)
    assert (out[3] == 0).all()
    assert merged[3] == -torch.inf
    torch.testing.assert_close(out[4], parts[0, 4], rtol=0, atol=1e-6)


def test_the_specification_beside_the_kernel_is_what_it_computes():
    k, v, table, kv_lens = make_cache(kv_lens=(37,), kv_heads=1)
    q = torch.randn(1, 1, 24)
    out, _ = paged_attention(q, k, v, table, kv_lens, options=Options(scale=0.2))
    expected = paged_attention_spec(q[0], k[:, :, 0], v[:, :, 0], table[0, :3], 37, 0.2)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-6)


def test_no_sequences():
    k, v, _, _ = make_cache()
    none = torch.empty(0, dtype=torch.int32)
    out, lse = paged_attention(torch.empty(0, 4, 24), k, v, torch.empty(0, 3, dtype=torch.int32), none)
    assert out.shape == (0, 4, 24)
    assert lse.shape == (4, 0)


def test_splits_fill_the_device_but_no_more_than_there_are_tiles():
    cpu = torch.device("cpu")  # where the interpreter counts as 4 multiprocessors
    assert choose_splits(1, 100, cpu) == 8
    assert choose_splits(1, 3, cpu) == 3
    assert choose_splits(3, 100, cpu) == 3
    assert choose_splits(1000, 100, cpu) == 1
    assert choose_splits(1, 0, cpu) == 1


def test_wrong_arguments_are_refused():
    cache, q = make_cache(), torch.randn(4, 4, 24)
    for splits in (0, 65):
        with pytest.raises(InvalidArgumentError, match=f"splits is {splits}; give a whole number from 1 to 64"):
            paged_attention(q, *cache, splits=splits)
    with pytest.raises(InvalidArgumentError, match=r"dropout_p=0.1; attention over a cache has none"):
        paged_attention(q, *cache, options=Options(dropout_p=0.1))
    with pytest.raises(InvalidArgumentError, match=r"q has shape .* it must have 3 dimensions"):
        paged_attention(q[None], *cache)
