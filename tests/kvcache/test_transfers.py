"""Transfers that are merged do what they would do one after the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.kvcache.transfers import Kind, Transfer, TransferList

KINDS: list[Kind] = ["copy", "move", "swap_out", "swap_in"]


def record(*calls: tuple[Kind, list[tuple[int, int]]]) -> tuple[Transfer, ...]:
    transfers = TransferList()
    for kind, pairs in calls:
        transfers.record(kind, pairs)
    return transfers.take()


def test_neighbours_of_one_kind_become_one() -> None:
    assert record(("copy", [(0, 5)]), ("copy", [(0, 6), (1, 7)])) == (Transfer("copy", ((0, 5), (0, 6), (1, 7))),)
    assert record(("swap_out", [(0, 0)]), ("swap_out", [(1, 1)])) == (Transfer("swap_out", ((0, 0), (1, 1))),)


def test_kinds_stay_apart_and_in_order() -> None:
    calls: list[tuple[Kind, list[tuple[int, int]]]] = [
        ("copy", [(0, 5)]),
        ("swap_out", [(1, 0)]),
        ("copy", [(2, 6)]),
        ("move", [(3, 7)]),
    ]
    assert [(transfer.kind, list(transfer.pairs)) for transfer in record(*calls)] == calls


def test_what_the_first_writes_is_not_read_or_written_by_the_second_in_one_go() -> None:
    assert len(record(("copy", [(0, 5)]), ("copy", [(5, 6)]))) == 2
    assert len(record(("copy", [(0, 5)]), ("copy", [(1, 5)]))) == 2
    assert len(record(("swap_in", [(0, 5)]), ("swap_in", [(1, 5)]))) == 2
    # What was merged counts, too.
    assert len(record(("copy", [(0, 5)]), ("copy", [(0, 6)]), ("copy", [(6, 7)]))) == 2
    assert len(record(("copy", [(0, 5)]), ("copy", [(0, 6)]), ("copy", [(1, 6)]))) == 2


def test_blocks_of_the_host_are_others() -> None:
    assert len(record(("swap_out", [(0, 1)]), ("swap_out", [(1, 0)]))) == 1
    assert len(record(("swap_in", [(0, 1)]), ("swap_in", [(1, 0)]))) == 1


def test_each_is_told_once_and_empty_ones_never() -> None:
    transfers = TransferList()
    transfers.record("move", [])
    assert transfers.take() == ()
    transfers.record("move", iter([(1, 2)]))
    assert transfers.take() == (Transfer("move", ((1, 2),)),)
    assert transfers.take() == ()
    transfers.record("move", [(2, 3)])  # what was taken is not a neighbour
    assert transfers.take() == (Transfer("move", ((2, 3),)),)


def carry_out(calls: list[tuple[Kind, tuple[tuple[int, int], ...]]]) -> tuple[list[str], list[str]]:
    cache, host = [f"c{i}" for i in range(5)], [f"h{i}" for i in range(5)]
    for kind, pairs in calls:
        source, target = (host if kind == "swap_in" else cache), (host if kind == "swap_out" else cache)
        for (_, b), word in zip(pairs, [source[a] for a, _ in pairs], strict=True):
            target[b] = word
    return cache, host


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.lists(
                st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3, unique_by=lambda pair: pair[1]
            ),
        ),
        max_size=6,
    )
)
def test_the_outcome_is_that_of_the_single_ones(calls: list[tuple[Kind, list[tuple[int, int]]]]) -> None:
    taken = record(*calls)
    assert [pair for transfer in taken for pair in transfer.pairs] == [pair for _, pairs in calls for pair in pairs]
    for transfer in taken:
        assert len({b for _, b in transfer.pairs}) == len(transfer.pairs)
    one_by_one = carry_out([(kind, tuple(pairs)) for kind, pairs in calls])
    assert carry_out([(transfer.kind, transfer.pairs) for transfer in taken]) == one_by_one
