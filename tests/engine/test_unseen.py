"""Blocks that no later query sees, against a look at all pairs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.patterns import (
    Banded,
    Causal,
    Documents,
    GlobalTokens,
    LocalWindow,
    Pattern,
    Strided,
)
from vllm_teach.engine.unseen import unseen_blocks

HORIZON = 40  # beyond every number below, so that later queries see nothing new

simple = st.one_of(
    st.just(Causal()),
    st.builds(LocalWindow, st.integers(-1, 9), st.integers(-1, 3)),
    st.builds(Banded, st.integers(0, 5)),
    st.builds(GlobalTokens, st.integers(0, 9), st.booleans()),
)
combined = st.recursive(
    simple,
    lambda inner: st.tuples(inner, inner, st.booleans()).map(lambda t: t[0] & t[1] if t[2] else t[0] | t[1]),
    max_leaves=4,
)


@given(combined, st.integers(0, 20), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_exactly_what_no_later_query_sees(pattern: Pattern, num_tokens: int, block_size: int) -> None:
    mask = (pattern & Causal()).mask(HORIZON, HORIZON)
    seen = mask[num_tokens:].any(0)
    wanted = [
        block
        for block in range(num_tokens // block_size)
        if not seen[block * block_size : (block + 1) * block_size].any()
    ]
    assert unseen_blocks(pattern, num_tokens, block_size) == wanted


@pytest.mark.parametrize("pattern", [Strided(3), ~LocalWindow(3), Documents([0, 99]), Causal() & Strided(2), None])
def test_nothing_is_given_up_where_nothing_is_known(pattern: Pattern | None) -> None:
    assert unseen_blocks(pattern, 90, 4) == []


def test_sinks_and_a_window() -> None:
    assert unseen_blocks(GlobalTokens(4) | LocalWindow(511), 4096, 16) == list(range(1, 224))
