"""Patterns are values: equal when they say the same in the same words, hashable, printed as they are written."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.patterns import (
    Banded,
    BlockSparsePattern,
    Causal,
    Documents,
    GlobalTokens,
    LocalWindow,
    Pattern,
    Strided,
)
from vllm_teach.errors import InvalidArgumentError

EQUAL = [
    (lambda: Causal()),
    (lambda: LocalWindow(4)),
    (lambda: Banded(4, 2)),
    (lambda: Strided(4)),
    (lambda: GlobalTokens(4)),
    (lambda: GlobalTokens(4, symmetric=True)),
    (lambda: Documents([0, 4])),
    (lambda: BlockSparsePattern([[1, 0], [1, 1]], 4)),
    (lambda: BlockSparsePattern([[1, 0], [1, 1]], 5)),
    (lambda: Causal() & Strided(4)),
    (lambda: Causal() | Strided(4)),
    (lambda: ~Causal()),
]


def test_equal_only_to_its_like() -> None:
    first, second = [make() for make in EQUAL], [make() for make in EQUAL]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            assert (one == other) == (i == j)
    assert len({*first, *second}) == len(EQUAL)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_printed_as_it_is_written(data, patterns) -> None:
    pattern = data.draw(patterns)
    names = {kind.__name__: kind for kind in (Causal, LocalWindow, Banded, Strided, GlobalTokens, Documents)}
    if "BlockSparse" not in repr(pattern) and "…" not in repr(pattern):
        assert eval(repr(pattern), names) == pattern


def test_long_ones_are_printed_short() -> None:
    assert repr(Documents(range(0, 1000, 10))) == "Documents([0, 10, 20, 30, …, 990])"
    shown = repr(BlockSparsePattern.local_and_global(32, 256) & Causal())
    assert shown == "(BlockSparsePattern(32 x 32 blocks of 256, 122 of 1024 set) & Causal())"


def test_one_layout_in_many_guises() -> None:
    layout = [[True, False], [True, True]]
    guises = [layout, [[1, 0], [1, 1]], tuple(map(tuple, layout)), np.array(layout), torch.tensor(layout).int()]
    assert len({BlockSparsePattern(guise, 8) for guise in guises}) == 1
    assert BlockSparsePattern(layout).block == 256
    starts = [[0, 3, 9], (0, 3, 9), np.array([0, 3, 9]), torch.tensor([0, 3, 9], dtype=torch.int32)]
    assert len({Documents(guise) for guise in starts}) == 1


def test_a_layout_is_kept_as_it_was() -> None:
    layout = torch.eye(2, dtype=torch.bool)
    pattern = BlockSparsePattern(layout, 1)
    layout.fill_(True)
    assert torch.equal(pattern.mask(2, 2), torch.eye(2, dtype=torch.bool))


def test_only_patterns_combine() -> None:
    with pytest.raises(TypeError):
        Causal() & 3
    with pytest.raises(TypeError):
        Causal() | None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalWindow(-2), "left is -2"),
        (lambda: LocalWindow(3, 1.5), "right is 1.5"),
        (lambda: LocalWindow(True), "left is True"),
        (lambda: Banded(-1), "width is -1"),
        (lambda: Banded(2, 0), "dilation is 0"),
        (lambda: Strided(0), "stride is 0"),
        (lambda: Strided("2"), "stride is '2'"),
        (lambda: GlobalTokens(-1), "n is -1"),
        (lambda: GlobalTokens(4, 1), "symmetric is 1"),
        (lambda: Documents([]), "cu_seqlens is \\[\\]"),
        (lambda: Documents([1, 3]), "must start with 0"),
        (lambda: Documents([0, 3, 2]), "never fall"),
        (lambda: Documents([0, 2.5]), "whole numbers"),
        (lambda: Documents(7), "cu_seqlens is of type int"),
        (lambda: Documents(torch.tensor(7)), "cu_seqlens is of type Tensor"),
        (lambda: Documents([[0, 3]]), "whole numbers"),
        (lambda: BlockSparsePattern([[1, 0]]), "layout has shape \\[1, 2\\]"),
        (lambda: BlockSparsePattern([1, 0]), "layout has shape \\[2\\]"),
        (lambda: BlockSparsePattern([[1], [1, 0]]), "layout is no grid"),
        (lambda: BlockSparsePattern([[2]]), "whole numbers 0 and 1"),
        (lambda: BlockSparsePattern([[0.5]]), "layout has dtype float64"),
        (lambda: BlockSparsePattern([[1]], 0), "block is 0"),
        (lambda: BlockSparsePattern([[1]], 4).mask(5, 5), "at least 2 blocks"),
        (lambda: (Causal() | ~BlockSparsePattern([[1]], 4)).tile_map(1, 5, 2, 2), "kv_len is 5"),
        (lambda: (Documents([0, 4]) & Causal()).density(5, 5), "cu_seqlens ends with 4 and kv_len is 5"),
        (lambda: Causal().mask(-1, 2), "q_len is -1"),
        (lambda: Causal().density(1, 2.0), "kv_len is 2.0"),
        (lambda: Causal().tile_map(4, 4, 0, 2), "tile_q is 0"),
        (lambda: Causal().tile_map(4, 4, 2, -1), "tile_k is -1"),
    ],
)
def test_what_cannot_work_is_refused(make, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


class Returns(Pattern):
    """A pattern whose `sees` gives whatever it was made with."""

    def __init__(self, answer):
        self.answer = answer

    def sees(self, q_pos, k_pos):
        return self.answer(q_pos, k_pos)


def test_a_rule_that_asks_for_the_keys_alone_is_broadcast():
    mask = Returns(lambda q_pos, k_pos: k_pos < 2).mask(3, 4)
    assert mask.tolist() == [[True, True, False, False]] * 3
    assert Returns(lambda q_pos, k_pos: q_pos < 2).tile_map(4, 4, 2, 2).tolist() == [[2, 2], [0, 0]]


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda q_pos, k_pos: (k_pos <= q_pos).int(), r"torch.int32 of shape \[3, 4\]"),
        (lambda q_pos, k_pos: None, "NoneType"),
        (lambda q_pos, k_pos: torch.ones(3, dtype=torch.bool), r"torch.bool of shape \[3\]"),
        (lambda q_pos, k_pos: (k_pos <= q_pos)[None], r"torch.bool of shape \[1, 3, 4\]"),
    ],
)
def test_a_rule_with_another_answer_than_booleans_is_refused(answer, got):
    with pytest.raises(InvalidArgumentError, match=rf"^Returns.sees returned {got} for .*; return bool of shape"):
        Returns(answer).mask(3, 4)
    with pytest.raises(InvalidArgumentError, match=r"^Returns.sees returned"):
        Returns(answer).tile_map(3, 4, 2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents(torch.tensor([0, 5], device="meta")), "cu_seqlens is on meta"),
        (lambda: Documents(torch.tensor([0, 5]).to_sparse()), "cu_seqlens is of layout torch.sparse_coo"),
        (lambda: BlockSparsePattern(torch.ones(2, 2, device="meta")), "layout is on meta"),
        (lambda: BlockSparsePattern(torch.eye(2).to_sparse()), "layout is of layout torch.sparse_coo"),
        (lambda: BlockSparsePattern(torch.ones(2, 2, requires_grad=True)), "layout has dtype float64"),
        (lambda: BlockSparsePattern(torch.ones(2, 2, dtype=torch.bfloat16)), "layout has dtype float64"),
        (lambda: BlockSparsePattern(np.zeros((3, 0))), r"layout has shape \[3, 0\]"),
    ],
)
def test_tensors_that_cannot_be_read_are_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_numpys_numbers_are_kept_as_pythons():
    for pattern in (LocalWindow(np.int64(3), np.int8(1)), Banded(np.int8(3), np.int8(2)), Strided(np.uint8(3))):
        assert {type(value) for value in vars(pattern).values()} == {int}
    random = BlockSparsePattern.random(np.int64(4), 2, density=0.7, seed=np.int64(5))
    assert random == BlockSparsePattern.random(4, 2, density=0.7, seed=5)
