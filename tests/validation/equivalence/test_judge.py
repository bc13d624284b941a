"""The rule that excuses a token, on scores made by hand."""

import pytest
import torch

from vllm_teach.validation.equivalence.judge import find_differences

# The reference's own tokens are 1, 2, 0, 3. At position 2 tokens 0 and 4 tie within 1e-3; elsewhere nothing does.
SCORES = torch.tensor(
    [
        [0.0, 5.0, 1.0, 1.0, 2.0],
        [0.0, 1.0, 5.0, 1.0, 2.0],
        [5.0, 1.0, 1.0, 1.0, 4.9995],
        [0.0, 1.0, 1.0, 5.0, 4.9],
    ]
)
EXPECTED = [1, 2, 0, 3]


def scores_from(first: int) -> torch.Tensor:
    return SCORES[first:]


def never_asked(first: int) -> torch.Tensor:
    raise AssertionError("equal tokens need no scores")


def test_equal_tokens_are_no_difference() -> None:
    assert find_differences(EXPECTED, EXPECTED, never_asked) == []


def test_a_wrong_token_is_caught() -> None:
    (found,) = find_differences([1, 4, 0, 3], EXPECTED, scores_from, request=7, completion=2)
    assert (found.request, found.completion, found.position, found.ours, found.theirs) == (7, 2, 1, 4, 2)
    assert found.gap == pytest.approx(3.0)
    assert not found.excused
    assert "WRONG" in str(found)


def test_a_near_tie_is_excused_and_listed() -> None:
    (found,) = find_differences([1, 2, 4, 3], EXPECTED, scores_from)
    assert (found.position, found.ours, found.theirs) == (2, 4, 0)
    assert found.gap == pytest.approx(5e-4, rel=1e-2)
    assert found.excused
    assert "excused" in str(found)


def test_a_third_token_is_not_excused_by_the_tie_of_two_others() -> None:
    (found,) = find_differences([1, 2, 1, 3], EXPECTED, scores_from)
    assert not found.excused


def test_a_gap_just_above_the_limit_is_not_excused() -> None:
    scores = torch.tensor([[1.0, 1.0 + 1.2e-3]])
    (found,) = find_differences([0], [1], lambda first: scores[first:])
    assert not found.excused


def test_after_an_excused_token_the_rest_is_judged_on_our_prefix() -> None:
    """After its own 4 the reference would go on with 3, whatever its first continuation was."""
    assert len(find_differences([1, 2, 4, 3], [1, 2, 0, 0], scores_from)) == 1
    excused, wrong = find_differences([1, 2, 4, 0], [1, 2, 0, 0], scores_from)
    assert excused.excused
    assert (wrong.position, wrong.ours, wrong.theirs, wrong.excused) == (3, 0, 3, False)


def test_two_answers_of_the_reference_must_tie_too() -> None:
    """With its cache it said 1, and without it that 1 lies far below ours: no tie, whichever is right."""
    (found,) = find_differences([0], [1], lambda first: torch.tensor([[5.0, 1.0]]))
    assert not found.excused


@pytest.mark.parametrize(("ours", "at"), [([1, 2, 0], (3, None, 3)), ([*EXPECTED, 1], (4, 1, None))])
def test_another_length_is_never_excused(ours: list[int], at: tuple) -> None:
    (found,) = find_differences(ours, EXPECTED, never_asked)
    assert (found.position, found.ours, found.theirs) == at
    assert not found.excused
