"""The ready-made block layouts: how many blocks they set, and which."""

import pytest

from vllm_teach.attention.patterns import BlockSparsePattern, Causal
from vllm_teach.errors import InvalidArgumentError


def drawn(pattern: BlockSparsePattern) -> str:
    return " ".join("".join("#" if cell else "." for cell in row) for row in pattern.layout)


def test_local_and_global() -> None:
    assert drawn(BlockSparsePattern.local_and_global(5, local=2, global_=1)) == "#.... ##... ###.. #.##. #..##"
    assert drawn(BlockSparsePattern.local_and_global(3, local=1, global_=0)) == "#.. .#. ..#"
    both_ways = BlockSparsePattern.local_and_global(5, local=2, global_=1, causal=False)
    assert drawn(both_ways) == "##### ###.. ####. #.### #..##"
    assert drawn(BlockSparsePattern.local_and_global(2, local=9, global_=9)) == "#. ##"
    assert BlockSparsePattern.local_and_global(0).layout == ()


@pytest.mark.parametrize("density", [0.2, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("causal", [True, False])
def test_random_layouts_have_the_density_asked_for(density, causal) -> None:
    pattern = BlockSparsePattern.random(16, 256, density=density, seed=3, causal=causal)
    cells = [(i, j) for i, row in enumerate(pattern.layout) for j, cell in enumerate(row) if cell]
    assert len(cells) == round(density * (16 * 17 // 2 if causal else 16 * 16))
    assert {(i, i) for i in range(16)} <= set(cells)
    assert all(j <= i for i, j in cells) or not causal
    assert pattern.density(4096, 4096) == len(cells) / 256


def test_a_seed_names_a_layout() -> None:
    def make(seed: int) -> BlockSparsePattern:
        return BlockSparsePattern.random(16, density=0.5, seed=seed)

    assert make(0) == make(0) != make(1)
    assert drawn(BlockSparsePattern.random(4, density=0.7, seed=0)) == "#... ##.. ..#. #.##"


def test_a_causal_layout_still_needs_the_causal_mask() -> None:
    pattern = BlockSparsePattern.random(4, 8, density=0.5)
    assert pattern.mask(32, 32).triu(1).any()
    assert not (pattern & Causal()).mask(32, 32).triu(1).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 1.1}, "density is 1.1"),
        ({"density": 0.1}, "give 0.400, their diagonal, to 1"),
        ({"density": float("nan")}, "density is nan"),
        ({"density": 0.5, "seed": -1}, "seed is -1"),
    ],
)
def test_densities_that_cannot_be(arguments, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        BlockSparsePattern.random(4, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"local": 0}, "local is 0"), ({"global_": -1}, "global_ is -1"), ({"num_blocks": -1}, "num_blocks is -1")],
)
def test_layouts_that_cannot_be(arguments, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        BlockSparsePattern.local_and_global(**{"num_blocks": 4} | arguments)
