import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.layout import Paged, Varlen, check_layout, check_once, each_sequence
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.errors import InvalidArgumentError


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> torch.Tensor:
    return int32(*[sum(lengths[:i]) for i in range(len(lengths) + 1)])


Q, K = torch.zeros(5, 4, 8), torch.zeros(7, 2, 8)
VARLEN = Varlen(int32(0, 2, 2, 5), int32(0, 3, 7, 7))
CACHE = torch.zeros(6, 4, 2, 8)
PAGED = Paged(int32(0, 2, 2, 5), int32(5, 0, 1, 9, 3, -1).view(3, 2), int32(8, 3, 2))  # 9 and -1 are never read


def test_the_sizes_of_a_varlen_call():
    sequences = check_layout(Q, K, K, VARLEN)
    assert sequences.shape == AttentionShape(3, 3, 4, 4, 2, 8)
    assert sequences.q_starts == (0, 2, 2, 5)
    assert sequences.kv_lens == (3, 4, 0)
    assert [sequences.shape_of(i) for i in range(3)] == [
        AttentionShape(1, 2, 3, 4, 2, 8),
        AttentionShape(1, 0, 4, 4, 2, 8),
        AttentionShape(1, 3, 0, 4, 2, 8),
    ]


def test_the_sizes_of_a_paged_call():
    sequences = check_layout(Q, CACHE, CACHE, PAGED)
    assert sequences.shape == AttentionShape(3, 3, 8, 4, 2, 8)
    assert sequences.kv_lens == (8, 3, 2)


@pytest.mark.parametrize("layout", [Varlen(int32(0), int32(0)), Paged(int32(0), int32().view(0, 3), int32())])
def test_no_sequences_at_all(layout):
    k = torch.zeros(0, 2, 8) if isinstance(layout, Varlen) else CACHE
    sequences = check_layout(torch.zeros(0, 4, 8), k, k, layout)
    assert sequences.shape == AttentionShape(0, 0, 0, 4, 2, 8)
    assert list(each_sequence(k, k, layout, sequences)) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=5), st.integers(1, 4), st.randoms())
@settings(max_examples=150, deadline=None)
def test_each_sequence_gets_its_own_rows(lengths, block_size, rng):
    """Token t of sequence i holds 100 i + t, and everything that is no token is NaN."""
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    tokens = [[100.0 * i + t for t in range(kv)] for i, kv in enumerate(kv_lens)]
    flat = torch.tensor([x for row in tokens for x in row]).view(-1, 1, 1)
    varlen = Varlen(starts(q_lens), starts(kv_lens))

    width = max((-(-kv // block_size) for kv in kv_lens), default=0)
    free = list(range(width * len(lengths) + 1))
    rng.shuffle(free)
    cache = torch.full((len(free), block_size, 1, 1), math.nan)
    table = torch.full((len(lengths), width), -7, dtype=torch.int32)
    for i, kv in enumerate(kv_lens):
        for t in range(kv):
            if t % block_size == 0:
                table[i, t // block_size] = free.pop()
            cache[table[i, t // block_size], t % block_size] = tokens[i][t]
    paged = Paged(starts(q_lens), table, int32(*kv_lens))

    q = torch.zeros(sum(q_lens), 1, 1)
    for layout, k in ((varlen, flat), (paged, cache)):
        found = list(each_sequence(k, k + 0.5, layout, check_layout(q, k, k, layout)))
        assert [keys.flatten().tolist() for _, keys, _ in found] == tokens
        assert [values.flatten().tolist() for _, _, values in found] == [[x + 0.5 for x in row] for row in tokens]
        assert [rows for rows, _, _ in found] == [
            slice(sum(q_lens[:i]), sum(q_lens[: i + 1])) for i in range(len(q_lens))
        ]


def test_the_keys_of_a_varlen_are_views_and_those_of_scattered_blocks_are_not():
    for layout, k, shares in ((VARLEN, K, True), (PAGED, CACHE, False)):
        _, keys, _ = next(each_sequence(k, k, layout, check_layout(Q, k, k, layout)))
        assert (keys.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()) == shares


def test_blocks_that_follow_one_another_are_read_as_a_view():
    caches = torch.randn(2, 3, 6, 4, 2, 8)  # of 3 layers, as the engine keeps them
    k, v = caches[0, 1], caches[1, 1]
    table = int32(2, 3, 4, 5, 3, 9, 5, -1, 1, 0, 3, 4).view(4, 3)
    layout = Paged(int32(0, 1, 2, 3, 4), table, int32(11, 4, 0, 12))
    sequences = check_layout(torch.zeros(4, 4, 8), k, v, layout)
    assert sequences.runs == (2, 5, 0, -1)  # an empty sequence has no block to be anywhere
    found = list(each_sequence(k, v, layout, sequences))
    for (_, keys, values), first in zip(found[:2], (2, 5), strict=True):
        assert keys.data_ptr() == k[first].data_ptr()
        assert values.data_ptr() == v[first].data_ptr()
    assert torch.equal(found[0][1], k[2:5].flatten(0, 1)[:11])
    assert torch.equal(found[3][2], v[[0, 3, 4]].flatten(0, 1))
    assert [len(keys) for _, keys, _ in found] == [11, 4, 0, 12]


def test_a_layout_is_read_once_when_it_is_checked_once():
    checked = check_once(Q, CACHE, CACHE, PAGED)
    wanted = check_layout(Q, CACHE, CACHE, PAGED)
    assert check_layout(Q, CACHE, CACHE, checked) == wanted
    checked.kv_lens.fill_(999)  # which the first look would refuse
    try:
        assert check_layout(Q, CACHE, CACHE, checked) == wanted
        other_heads = torch.zeros(5, 8, 8)
        assert check_layout(other_heads, CACHE, CACHE, checked).shape.q_heads == 8
        for q, k in ((Q[:4], CACHE), (Q, CACHE[:5]), (Q, CACHE.flatten(0, 1).view(12, 2, 2, 8))):
            with pytest.raises(InvalidArgumentError):  # of other sizes, it is read again
                check_layout(q, k, k, checked)
        with pytest.raises(InvalidArgumentError):  # a changed copy is not taken for checked
            check_layout(Q, CACHE, CACHE, replace(checked, cu_seqlens_q=int32(0, 2, 2, 5)))
    finally:
        PAGED.kv_lens.copy_(int32(8, 3, 2))
    assert PAGED.checked is None
    assert check_layout(Q, K, K, check_once(Q, K, K, VARLEN)) == check_layout(Q, K, K, VARLEN)


BAD = {
    "no layout": ((Q, K, K, None), "layout is of type NoneType; give a Varlen, a Paged or None."),
    "q is no tensor": ((None, K, K, VARLEN), "q is of type NoneType; give a tensor [total_q, q_heads, head_dim]."),
    "rank of q": ((Q[None], K, K, VARLEN), "q has shape [1, 5, 4, 8]; with Varlen it must be [total_q, q_heads"),
    "rank of k": ((Q, CACHE, CACHE, VARLEN), "k has shape [6, 4, 2, 8]; with Varlen it must be [total_k, kv_heads"),
    "rank of a cache": ((Q, K, K, PAGED), "k has shape [7, 2, 8]; with Paged it must be [num_blocks, block_size"),
    "v unlike k": ((Q, K, K[:6], VARLEN), "v has shape [6, 2, 8] and k [7, 2, 8]"),
    "dtypes": ((Q.half(), K, K, VARLEN), "k has dtype torch.float32 and q torch.float16"),
    "heads": ((Q[:, :3], K, K, VARLEN), "the 3 heads of q must be a multiple of the 2 of k."),
    "not int32": (
        (Q, K, K, replace(VARLEN, cu_seqlens_q=VARLEN.cu_seqlens_q.long())),
        "cu_seqlens_q has dtype torch.int64 and shape [4]; it must be int32 of shape [any].",
    ),
    "a list": ((Q, K, K, replace(VARLEN, cu_seqlens_k=[0, 7])), "cu_seqlens_k is of type list; give an int32 tensor."),
    "starts at 1": (
        (Q, K, K, replace(VARLEN, cu_seqlens_q=int32(1, 2, 2, 5))),
        "cu_seqlens_q is [1, 2, 2, 5]; it must",
    ),
    "falls": ((Q, K, K, replace(VARLEN, cu_seqlens_q=int32(0, 3, 2, 5))), "cu_seqlens_q is [0, 3, 2, 5]; it must"),
    "ends early": ((Q, K, K, replace(VARLEN, cu_seqlens_k=int32(0, 3, 6, 6))), "end with 7, the number of rows."),
    "empty starts": ((Q, K, K, replace(VARLEN, cu_seqlens_q=int32())), "cu_seqlens_q is []; it must"),
    "long": (
        (Q, K, K, replace(VARLEN, cu_seqlens_q=int32(*range(12)))),
        "cu_seqlens_q is [0, 1, 2, 3, …, 11]; it must",
    ),
    "unequal counts": (
        (Q, K, K, replace(VARLEN, cu_seqlens_k=int32(0, 7))),
        "cu_seqlens_k describes 1 sequences and cu_seqlens_q 3; make them equal.",
    ),
    "rank of the table": (
        (Q, CACHE, CACHE, replace(PAGED, block_table=int32(0, 1, 2))),
        "block_table has dtype torch.int32 and shape [3]; it must be int32 of shape [3, any].",
    ),
    "rows of the table": (
        (Q, CACHE, CACHE, replace(PAGED, block_table=PAGED.block_table[:2])),
        "block_table has dtype torch.int32 and shape [2, 2]; it must be int32 of shape [3, any].",
    ),
    "rows of the lengths": (
        (Q, CACHE, CACHE, replace(PAGED, kv_lens=int32(1, 1))),
        "kv_lens has dtype torch.int32 and shape [2]; it must be int32 of shape [3].",
    ),
    "too long": (
        (Q, CACHE, CACHE, replace(PAGED, kv_lens=int32(9, 3, 2))),
        "kv_lens holds 9; block_table has room for 0 to 8",
    ),
    "negative": ((Q, CACHE, CACHE, replace(PAGED, kv_lens=int32(8, -1, 2))), "kv_lens holds -1; block_table has room"),
    "no such block": (
        (Q, CACHE, CACHE, replace(PAGED, kv_lens=int32(8, 5, 2))),
        "block_table holds 9; k has the blocks 0 to 5.",
    ),
    "negative block": (
        (Q, CACHE, CACHE, replace(PAGED, kv_lens=int32(8, 3, 5))),
        "block_table holds -1; k has the blocks",
    ),
    "blocks of nothing": ((Q, CACHE[:, :0], CACHE[:, :0], PAGED), "its blocks must hold at least one key."),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_by_name(name):
    arguments, words = BAD[name]
    with pytest.raises(InvalidArgumentError) as raised:
        check_layout(*arguments)
    assert words in str(raised.value), str(raised.value)
