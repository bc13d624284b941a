import math
import random
from typing import Any

import pytest
import torch

from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.reference import naive_attention
from vllm_teach.attention.split_kv import choose_num_splits, merge_attention, share_out, split_kv_attention
from vllm_teach.errors import InvalidArgumentError


def random_call(seed: int) -> tuple[dict[str, int], dict[str, Any], int]:
    rng = random.Random(seed)
    q_heads, kv_heads = rng.choice([(1, 1), (4, 2), (6, 1)])
    batch = rng.randint(1, 2)
    sizes = {"batch": batch, "q_len": rng.choice([0, 1, 1, 3, 9]), "kv_len": rng.choice([0, 1, 5, 16, 33, 64])}
    sizes |= {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": rng.choice([1, 8, 16])}
    slopes = torch.rand(rng.choice([(q_heads,), (batch, q_heads)]), generator=torch.Generator().manual_seed(seed))
    variant: dict[str, Any] = {
        "causal": rng.random() < 0.5,
        "window_size": rng.choice([(-1, -1), (4, 0), (0, -1), (2, 3)]),
        "softcap": rng.choice([0.0, 1.5]),
        "alibi_slopes": rng.choice([None, slopes]),
        "scale": rng.choice([None, 0.3]),
        "pattern": rng.choice([None, ~LocalWindow(1, 1), Causal()]),
    }
    return sizes, variant, rng.choice([1, 7, 16])


@pytest.mark.parametrize("seed", range(40))
def test_any_number_of_splits_gives_the_naive_result(make_qkv, seed):
    sizes, variant, tile_k = random_call(seed)
    q, k, v = make_qkv(**sizes, seed=seed)
    expected, expected_lse = naive_attention(q, k, v, return_lse=True, **variant)
    for num_splits in (0, 1, 2, 3, 8, 1000):
        out, lse = split_kv_attention(q, k, v, num_splits, tile_k=tile_k, **variant)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_rounds_only_at_the_end(make_qkv, dtype):
    q, k, v = make_qkv(q_len=2, kv_len=600, q_heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    exact = naive_attention(q.double(), k.double(), v.double(), causal=True)
    plain = naive_attention(q, k, v, causal=True)
    for num_splits in (1, 5):
        out, lse = split_kv_attention(q, k, v, num_splits, causal=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 1e-5


def test_autocast_does_not_reach_the_products(make_qkv):
    q, k, v = make_qkv(q_len=1, kv_len=300, head_dim=64, dtype=torch.float32)
    alone = split_kv_attention(q, k, v, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = split_kv_attention(q, k, v, 3)
    assert all(torch.equal(a, b) for a, b in zip(alone, inside, strict=True))


def test_hidden_tiles_are_not_read(make_qkv):
    q, k, v = make_qkv(q_len=1, kv_len=64)
    expected = naive_attention(q, k, v, window_size=(7, 0))
    k[:, :48] = v[:, :48] = math.nan
    for num_splits in (1, 2):
        out, _ = split_kv_attention(q, k, v, num_splits, tile_k=8, window_size=(7, 0))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_merging_is_attention_over_all_the_keys(make_qkv):
    q, k, v = make_qkv(q_len=4, kv_len=30, q_heads=4, kv_heads=2)
    parts = [
        naive_attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(9), slice(9, 10), slice(10, 30))
    ]
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = merge_attention([parts[i][0] for i in order], [parts[i][1] for i in order])
        expected, expected_lse = naive_attention(q, k, v, return_lse=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


def test_merging_parts_in_which_rows_saw_nothing():
    lses = [torch.tensor([[[-math.inf, 0.0, -math.inf]]]), torch.tensor([[[-math.inf, -math.inf, 800.0]]])]
    outs = [torch.tensor([0.0, 2.0, 0.0]).view(1, 3, 1, 1), torch.tensor([0.0, 0.0, 3.0]).view(1, 3, 1, 1)]
    out, lse = merge_attention(outs, lses)
    assert out.flatten().tolist() == [0, 2, 3]
    assert lse.flatten().tolist() == [-math.inf, 0, 800]
    assert torch.equal(merge_attention(outs[:1], lses[:1])[0], outs[0])


def test_merging_keeps_the_dtype_of_the_outputs():
    out, lse = merge_attention([torch.ones(1, 2, 1, 4).half()] * 2, [torch.zeros(1, 1, 2)] * 2)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert (out == 1).all()
    torch.testing.assert_close(lse, torch.full((1, 1, 2), math.log(2)))


@pytest.mark.parametrize(
    ("outs", "lses", "words"),
    [
        ([], [], "0 parts"),
        ([torch.zeros(1, 2, 3, 4)], [], "lses 0"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3)], r"\[1, 2, 3\]"),
        ([torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)], [torch.zeros(1, 3, 2)] * 2, r"\[1, 2, 3, 5\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(outs, lses, words):
    with pytest.raises(InvalidArgumentError, match=words):
        merge_attention(outs, lses)


@pytest.mark.parametrize(("tiles", "splits", "sizes"), [(8, 5, [2, 2, 2, 2]), (7, 3, [3, 3, 1]), (2, 9, [1, 1])])
def test_sharing_out(tiles, splits, sizes):
    numbered = [((i, i + 1), 2) for i in range(tiles)]
    parts = share_out(numbered, splits)
    assert [len(part) for part in parts] == sizes
    assert [tile for part in parts for tile in part] == numbered
    assert share_out([], splits) == [[]]


def chosen_by_hand(pieces: int, tiles: int, workers: int) -> int:
    """The rule as its docstring says it, by listing who is busy when."""
    if pieces >= 0.8 * workers:
        return 1
    shares = {}
    for splits in range(1, min(128, workers, tiles) + 1):
        if len(share_out([((0, 1), 2)] * tiles, splits)) == splits:
            waves = -(-pieces * splits // workers)
            shares[splits] = pieces * splits / (waves * workers)
    return min(splits for splits in shares if shares[splits] >= 0.85 * max(shares.values()))


def test_the_choice_follows_its_rule():
    chosen = set()
    for seed in range(300):
        rng = random.Random(seed)
        batch, heads, q_len = rng.randint(1, 8), rng.choice([1, 2, 8, 12]), rng.choice([1, 64, 65])
        kv_len, workers = rng.randint(1, 20_000), rng.choice([1, 2, 8, 108, 216, 264])
        splits = choose_num_splits(batch, heads, q_len, kv_len, workers)
        assert splits == chosen_by_hand(batch * heads * -(-q_len // 64), -(-kv_len // 128), workers)
        chosen.add(splits)
    assert len(chosen) > 10


def test_the_choice_in_known_cases():
    assert choose_num_splits(1, 48, 1, 100_000, 108) == 2  # FlashAttention's own example
    assert choose_num_splits(64, 32, 1, 100_000, 108) == 1  # enough to do without
    assert choose_num_splits(1, 8, 1, 100, 216) == 1  # one tile cannot be split
    assert choose_num_splits(1, 8, 1, 32_768, 216) > 10  # one long sequence
    assert (
        choose_num_splits(0, 8, 1, 100, 8)
        == choose_num_splits(1, 8, 0, 100, 8)
        == choose_num_splits(1, 8, 1, 0, 8)
        == 1
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_splits": -1}, "num_splits is -1;"),
        ({"num_splits": 1.5}, "num_splits is 1.5;"),
        ({"tile_k": 0}, "tile_k is 0;"),
        ({"dropout_p": 0.1}, "dropout_p is 0.1;"),
        ({"softcap": -1.0}, "softcap is -1.0;"),
    ],
)
def test_misuse_is_refused(make_qkv, arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        split_kv_attention(*make_qkv(), **arguments)
    with pytest.raises(InvalidArgumentError, match="num_workers is 0;"):
        choose_num_splits(1, 1, 1, 1, 0)
