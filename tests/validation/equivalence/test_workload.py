from collections import Counter

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.validation.equivalence.workload import draw_greedy, draw_sampled, longest

TEXT = list(range(3000))


def test_lengths_reach_both_ends() -> None:
    requests = draw_greedy(TEXT, 64, 1500, 128)
    inputs = [len(request.prompt) for request in requests]
    outputs = [request.num_outputs for request in requests]
    assert len(requests) == 64
    assert (min(inputs), max(inputs)) == (1, 1500)
    assert (min(outputs), max(outputs)) == (1, 128)
    assert longest(requests) == max(a + b for a, b in zip(inputs, outputs, strict=True))
    assert all(request.params().greedy for request in requests)


def test_prompts_are_pieces_of_the_text_and_some_share_their_start() -> None:
    requests = draw_greedy(TEXT, 64, 1500, 128)
    for request in requests:
        first = request.prompt[0]
        assert list(request.prompt) == [(first + offset) % len(TEXT) for offset in range(len(request.prompt))]
    starts = Counter(request.prompt[0] for request in requests)
    assert sum(count for count in starts.values() if count > 1) == 48


def test_the_same_seed_gives_the_same_requests() -> None:
    assert draw_greedy(TEXT, 8, 50, 9, seed=4) == draw_greedy(TEXT, 8, 50, 9, seed=4)
    assert draw_greedy(TEXT, 8, 50, 9, seed=4) != draw_greedy(TEXT, 8, 50, 9, seed=5)


def test_sampled_requests_have_three_seeded_completions() -> None:
    requests = draw_sampled(TEXT, 12, 375, 128)
    assert all((each.params().n, each.params().greedy) == (3, False) for each in requests)
    assert len({each.seed for each in requests}) == 12
    assert any(len(each.prompt) % 64 == 0 for each in requests)
    assert any(len(each.prompt) % 4 for each in requests)


def test_no_text_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="draw at least 2"):
        draw_greedy([], 64, 10, 10)
