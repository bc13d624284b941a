import pytest

from vllm_teach.kvcache.contiguity import measure_contiguity
from vllm_teach.kvcache.length_mix import SHAREGPT
from vllm_teach.kvcache.waste import Lengths


@pytest.fixture(scope="module")
def lengths() -> Lengths:
    return [(prompt % 90 + 1, output % 120 + 1) for prompt, output in SHAREGPT.draw(60, seed=2)]


def test_two_sequences_by_hand() -> None:
    # Blocks of 2, six of them. Step 1: A in block 0, B in block 1. Steps 2 and 3: a third token each, A's second block
    # is 2, B's is 3, and neither follows the first. Both are read in all three steps: 2 + 2, 3 + 3, 4 + 4 tokens.
    found = measure_contiguity([(2, 3), (2, 3)], 12, "scattered", block_size=2)
    assert (found.viewed, found.gathered, found.moved) == (4, 14, 0)
    assert found.viewed_share == pytest.approx(4 / 18)


@pytest.mark.parametrize("placement", ["scattered", "prefer_contiguous", "contiguous"])
def test_every_token_of_every_step_is_read_once(placement: str, lengths: Lengths) -> None:
    found = measure_contiguity(lengths, 1024, placement)
    # Exactly that if nobody is preempted; who is, is computed and read once more.
    assert found.viewed + found.gathered >= sum(
        prompt * output + output * (output - 1) // 2 for prompt, output in lengths
    )


def test_a_contiguous_placement_is_always_viewed_and_a_scattered_one_never_moves(lengths: Lengths) -> None:
    contiguous, scattered = (measure_contiguity(lengths, 1024, each) for each in ("contiguous", "scattered"))
    assert (contiguous.gathered, contiguous.viewed_share) == (0, 1)
    assert contiguous.moved > 0
    assert scattered.moved == 0
    assert 0 < measure_contiguity(lengths, 1024, "prefer_contiguous").viewed_share < 1


def test_a_lower_threshold_moves_more_and_views_more(lengths: Lengths) -> None:
    always, seldom, never = (
        measure_contiguity(lengths, 1024, "prefer_contiguous", compact_above=above) for above in (0, 0.8, 1)
    )
    assert always.moved > seldom.moved > never.moved == 0
    assert always.viewed_share > seldom.viewed_share > never.viewed_share
