"""The dropout mask against Philox written again in Python's whole numbers, which know no overflow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.dropout import check_dropout, dropout_threshold, keep_mask, philox
from vllm_teach.errors import InvalidArgumentError

WORDS = st.integers(0, 2**32 - 1)


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 of Salmon et al., figure 2 and table 2, all four words."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (
            (product1 >> 32) ^ x1 ^ k0,
            product1 % 2**32,
            (product0 >> 32) ^ x3 ^ k1,
            product0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def kept_by_hand(seed: int, p: float, batch_head: int, query: int, key: int) -> bool:
    word = philox_by_hand((key, query, batch_head, 0), (seed % 2**32, seed // 2**32))[0]
    return word // 256 >= round(p * 2**24)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_oracle_gives_the_known_answers_of_random123(counter, key, words):
    assert philox_by_hand(counter, key) == words


def test_the_known_answer_of_counter_and_key_0():
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(0, zero, zero, zero).item() == 0x6627E8D5


@given(WORDS, WORDS, WORDS, st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_philox_equals_the_oracle(c0, c1, c2, seed):
    counters = [torch.tensor([c]) for c in (c0, c1, c2)]
    assert philox(seed, *counters).item() == philox_by_hand((c0, c1, c2, 0), (seed % 2**32, seed // 2**32))[0]


def test_the_largest_words_do_not_overflow():
    most = torch.tensor([2**32 - 1])
    expected = philox_by_hand((2**32 - 1,) * 3 + (0,), (2**32 - 1,) * 2)[0]
    assert philox(2**64 - 1, most, most, most).item() == expected


@pytest.mark.parametrize("axis", range(3))
def test_the_counters_broadcast_and_are_not_changed(axis):
    shapes = [[1, 1, 1] for _ in range(3)]
    for i, size in enumerate((5, 4, 3)):  # each counter along an axis of its own, in every order
        shapes[i][(i + axis) % 3] = size
    counters = [torch.randint(0, 2**32, shape) for shape in shapes]
    before = [c.clone() for c in counters]
    whole = torch.broadcast_tensors(*counters)
    words = philox(7, *counters)
    assert torch.equal(words, philox(7, *[w.clone() for w in whole]))
    by_hand = [philox_by_hand((*c, 0), (7, 0))[0] for c in zip(*[w.flatten().tolist() for w in whole], strict=True)]
    assert words.flatten().tolist() == by_hand
    assert all(torch.equal(a, b) for a, b in zip(counters, before, strict=True))


@pytest.mark.parametrize("seed", [0, 3, 2**32, 2**63 + 12345])
def test_a_mask_equals_the_oracle_pair_by_pair(seed):
    heads, rows, keys = torch.tensor([0, 5, 2**31]), (3, 7), (250, 255)
    mask = keep_mask(seed, 0.3, heads, rows, keys)
    expected = [
        [[kept_by_hand(seed, 0.3, head, i, j) for j in range(*keys)] for i in range(*rows)] for head in heads.tolist()
    ]
    assert mask.dtype == torch.bool
    assert mask.tolist() == expected


def test_a_tile_of_the_mask_is_a_slice_of_the_whole_one():
    whole = keep_mask(11, 0.4, torch.arange(6), (0, 70), (0, 90))
    for heads, rows, keys in [((0, 6), (0, 70), (32, 64)), ((2, 4), (13, 14), (0, 90)), ((5, 6), (69, 70), (89, 90))]:
        tile = keep_mask(11, 0.4, torch.arange(*heads), rows, keys)
        assert torch.equal(tile, whole[slice(*heads), slice(*rows), slice(*keys)])


def test_a_large_mask_is_drawn_in_pieces_and_is_the_same():
    rows = keys = (0, 400)  # more than are drawn in one go, for one head already
    large = keep_mask(1, 0.5, torch.arange(3), rows, keys)
    pieces = [keep_mask(1, 0.5, torch.tensor([head]), rows, keys) for head in range(3)]
    assert torch.equal(large, torch.cat(pieces))


@pytest.mark.parametrize(("heads", "rows", "keys"), [(0, (0, 3), (0, 4)), (2, (5, 5), (0, 4)), (2, (0, 3), (0, 0))])
def test_an_empty_mask_has_its_shape(heads, rows, keys):
    mask = keep_mask(0, 0.5, torch.arange(heads), rows, keys)
    assert mask.shape == (heads, rows[1] - rows[0], keys[1] - keys[0])


def test_the_same_seed_gives_the_same_mask_whatever_was_drawn_in_between():
    first = keep_mask(5, 0.5, torch.arange(2), (0, 20), (0, 20))
    torch.rand(100)
    assert torch.equal(first, keep_mask(5, 0.5, torch.arange(2), (0, 20), (0, 20)))
    assert not torch.equal(first, keep_mask(6, 0.5, torch.arange(2), (0, 20), (0, 20)))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten().double(), b.flatten().double())))[0, 1].item()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_1_less_p(p):
    n = 4 * 256 * 256
    kept = keep_mask(2024, p, torch.arange(4), (0, 256), (0, 256)).double().mean().item()
    assert abs(kept - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)


def test_neighbours_are_independent():
    """Along each axis, and from one seed to the next; the standard deviation of a correlation is 1 / sqrt(n)."""
    mask = keep_mask(2024, 0.5, torch.arange(4), (0, 256), (0, 256))
    bound = 5 / math.sqrt(3 * 256 * 256)
    assert abs(correlation(mask[1:], mask[:-1])) < bound
    assert abs(correlation(mask[:, 1:], mask[:, :-1])) < bound
    assert abs(correlation(mask[:, :, 1:], mask[:, :, :-1])) < bound
    assert abs(correlation(mask, keep_mask(2025, 0.5, torch.arange(4), (0, 256), (0, 256)))) < bound
    assert abs(correlation(mask, keep_mask(2024 + 2**32, 0.5, torch.arange(4), (0, 256), (0, 256)))) < bound


def test_probabilities_near_the_ends():
    heads, rows, keys = torch.arange(1), (0, 200), (0, 200)
    assert dropout_threshold(0.0) == 0
    assert keep_mask(1, 0.0, heads, rows, keys).all()
    assert dropout_threshold(1 - 2**-24) == 2**24 - 1
    assert keep_mask(1, 1 - 2**-24, heads, rows, keys).sum() <= 1


def test_no_seed_draws_one_from_pytorchs_generator():
    torch.manual_seed(3)
    first = check_dropout(0.1, None)
    assert check_dropout(0.1, None) != first
    torch.manual_seed(3)
    assert check_dropout(0.1, None) == first
    state = torch.get_rng_state()
    assert check_dropout(0, None) == 0  # nothing is dropped, so nothing is drawn
    assert torch.equal(torch.get_rng_state(), state)
    assert check_dropout(0.1, 2**64 - 1) == 2**64 - 1


@pytest.mark.parametrize("p", [1, 1.0, -0.1, math.nan, True, "0.1", None])
def test_a_probability_that_cannot_be_is_refused(p):
    shown = p if isinstance(p, float) or (p == 1 and p is not True) else f"of type {type(p).__name__}"
    with pytest.raises(InvalidArgumentError, match=rf"^dropout_p is {shown}; give a probability .*\.$"):
        check_dropout(p, 0)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "1"])
def test_a_seed_that_cannot_be_is_refused(seed):
    with pytest.raises(InvalidArgumentError, match=rf"^dropout_seed is {seed!r}; give .*\.$"):
        check_dropout(0.5, seed)
