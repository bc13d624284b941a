import math

import pytest
import torch

from vllm_teach.attention.patterns import Causal, LocalWindow, Pattern, TileKind
from vllm_teach.attention.scores import bias_and_mask, distances, grouped_slopes, modify_scores
from vllm_teach.attention.variant import Variant

ROWS, KEYS, OFFSET = (3, 6), (2, 7), -1  # query i stands at position i - 1


def by_hand(score, i, j, *, softcap=0.0, slope=0.0, bias=0.0, sees=lambda q_pos, j: True):
    """The score that softmax sees for query i and key j, in Python floats."""
    if not sees(i + OFFSET, j):
        return -math.inf
    capped = softcap * math.tanh(score / softcap) if softcap else score
    return capped - slope * abs(i + OFFSET - j) + bias


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_each_score_is_the_definition(softcap, slopes, masked, biased):
    scores = 3 * torch.randn(2, 2, 2, 3, 5, dtype=torch.float64)  # [batch, kv_heads, group, rows, keys]
    slopes = None if slopes is None else torch.rand(slopes)
    bias = torch.randn(2, 2, 2, 3, 5) if biased else None
    variant = Variant(scale=1.0, softcap=softcap, pattern=LocalWindow(2, 1) if masked else None)
    found = modify_scores(scores.clone(), variant, grouped_slopes(slopes, 2), ROWS, KEYS, OFFSET, bias=bias)
    for b in range(2):
        for head in range(4):
            for row in range(3):
                for key in range(5):
                    slope = 0 if slopes is None else float(slopes[head] if slopes.dim() == 1 else slopes[b, head])
                    expected = by_hand(
                        float(scores[b, head // 2, head % 2, row, key]),
                        ROWS[0] + row,
                        KEYS[0] + key,
                        softcap=softcap,
                        slope=slope,
                        bias=0 if bias is None else float(bias[b, head // 2, head % 2, row, key]),
                        sees=(lambda q_pos, j: q_pos - 2 <= j <= q_pos + 1) if masked else (lambda q_pos, j: True),
                    )
                    assert float(found[b, head // 2, head % 2, row, key]) == pytest.approx(expected, abs=1e-12)


def test_what_comes_after_softcap_can_be_had_alone():
    scores = torch.randn(1, 1, 2, 3, 5)
    variant = Variant(scale=1.0, softcap=2.0, pattern=Causal())
    arguments = (variant, grouped_slopes(torch.rand(2), 1), ROWS, KEYS, OFFSET)
    whole = modify_scores(scores.clone(), *arguments)
    assert torch.equal(whole, bias_and_mask(2.0 * torch.tanh(scores / 2.0), *arguments))


def test_a_bias_cannot_show_what_the_pattern_hides():
    variant = Variant(scale=1.0, pattern=Causal())
    found = modify_scores(torch.zeros(1, 1, 1, 3, 5), variant, None, ROWS, KEYS, OFFSET, bias=torch.full((1,), 9.0))
    assert torch.equal(found[0, 0, 0] == 9, Causal().tile_mask(ROWS, KEYS, OFFSET))
    assert found.isneginf().any()


class Unasked(Pattern):
    def sees(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a full tile needs no mask")


def test_a_full_tile_is_not_masked_and_nothing_to_do_costs_nothing():
    scores = torch.randn(1, 1, 1, 3, 5)
    variant = Variant(scale=1.0, pattern=Unasked())
    assert modify_scores(scores, variant, None, ROWS, KEYS, OFFSET, TileKind.FULL) is scores
    with pytest.raises(AssertionError):
        modify_scores(scores, variant, None, ROWS, KEYS, OFFSET, TileKind.PARTIAL)


def test_the_scores_keep_their_dtype():
    scores = torch.randn(1, 1, 2, 3, 5).half()
    variant = Variant(scale=1.0, softcap=3.0, pattern=Causal())
    assert modify_scores(scores, variant, grouped_slopes(torch.rand(2), 1), ROWS, KEYS, OFFSET).dtype == torch.float16


def test_distances_are_between_positions():
    assert distances((0, 2), (0, 3), 1, torch.zeros(())).tolist() == [[1, 0, 1], [2, 1, 0]]
    assert distances((0, 1), (0, 2), -3, torch.zeros(())).tolist() == [[3, 4]]  # more queries than keys: position -3


def test_slopes_follow_the_heads_into_their_groups():
    assert grouped_slopes(None, 2) is None
    flat = torch.arange(6.0)
    assert grouped_slopes(flat, 2).shape == (1, 2, 3, 1, 1)
    assert grouped_slopes(flat, 2)[0, 1, 0].item() == 3  # query head 3 is the first of key head 1
    assert grouped_slopes(torch.stack((flat, flat + 10)), 3)[1, 2, 1].item() == 15
