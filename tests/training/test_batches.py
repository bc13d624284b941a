import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.training import join_documents
from vllm_teach.training.batches import batch_at, derive_seed, steps_per_epoch


def test_documents_are_set_apart():
    assert join_documents([[5, 6], [], [7]]).tolist() == [0, 5, 6, 0, 0, 7, 0]


@given(length=st.integers(40, 400), batch_size=st.integers(1, 4), window=st.integers(2, 8), seed=st.integers(0, 2**40))
def test_an_epoch_shows_each_token_at_most_once_and_nearly_all(length, batch_size, window, seed):
    tokens = torch.arange(length)
    steps = steps_per_epoch(length, batch_size, window)
    for epoch in range(2):
        batches = [
            batch_at(tokens, epoch * steps + i, batch_size=batch_size, window=window, seed=seed) for i in range(steps)
        ]
        inputs = torch.cat([batch[0].flatten() for batch in batches])
        assert all(torch.equal(x + 1, y) for x, y in batches)
        assert len(inputs.unique()) == len(inputs) > length - (batch_size + 2) * window


def test_epochs_differ_and_repeat_from_the_seed():
    tokens = torch.arange(1000)
    steps = steps_per_epoch(1000, 4, 16)
    first, again, next_epoch, other_seed = (
        batch_at(tokens, step, batch_size=4, window=16, seed=seed)[0]
        for step, seed in ((3, 1), (3, 1), (3 + steps, 1), (3, 2))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, next_epoch)
    assert not torch.equal(first, other_seed)
    # Other offsets, too, not only other orders.
    starts = [batch_at(tokens, epoch * steps, batch_size=4, window=16, seed=1)[0][0, 0] for epoch in range(8)]
    assert len({int(start) % 16 for start in starts}) > 3


def test_a_stream_that_is_too_short():
    with pytest.raises(InvalidArgumentError, match=r"tokens has 79 ids, .* batch_size=4 .* give 80 or more"):
        steps_per_epoch(79, 4, 16)
    assert steps_per_epoch(80, 4, 16) == 1
    batch_at(torch.arange(80), 5, batch_size=4, window=16, seed=0)


def test_derived_seeds_are_apart():
    seeds = {derive_seed(seed, purpose, n) for seed in (0, 1) for purpose in ("a", "b") for n in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
