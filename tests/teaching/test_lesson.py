"""The first call of a notebook makes two runs draw the same numbers."""

import random

import numpy as np
import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import begin


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_two_runs_draw_the_same_numbers(capsys):
    drawn = []
    for _ in range(2):
        begin("01_naive_attention", threads=1, seed=7)
        drawn.append((torch.rand(3).tolist(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert torch.get_num_threads() == 1
    line = "01_naive_attention: device cpu, dtype float32, 1 thread, seed 7\n"
    assert capsys.readouterr().out == line + line


def test_threads_below_one():
    with pytest.raises(InvalidArgumentError, match="threads must be at least 1, but it is 0"):
        begin("x", threads=0)


@pytest.mark.parametrize("threads", ["2", 1.5, None, True])
def test_threads_that_are_no_whole_number(threads):
    with pytest.raises(InvalidArgumentError, match="threads must be at least 1"):
        begin("x", threads=threads)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**40, "0", 1.5, None])
def test_a_seed_that_numpy_does_not_take_changes_nothing(seed):
    before = torch.random.get_rng_state()
    with pytest.raises(InvalidArgumentError, match="seed must be a whole number from 0"):
        begin("x", threads=1, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
