"""How the biases are made, cut apart again and moved."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention import attn_bias as ab
from vllm_teach.attention.attn_bias.seqlens import PaddedSeqLenInfo, SeqLenInfo
from vllm_teach.errors import InvalidArgumentError


def test_the_attributes_have_xformers_names_and_values() -> None:
    info = SeqLenInfo.from_seqlens([2, 3, 2])
    assert (info.max_seqlen, info.min_seqlen, info.seqstart_py) == (3, 2, [0, 2, 5, 7])
    assert torch.equal(info.seqstart, torch.tensor([0, 2, 5, 7], dtype=torch.int32))
    assert info.seqstart.dtype == torch.int32
    padded = PaddedSeqLenInfo.from_seqlens_padded([2, 3, 2], 4)
    assert (padded.max_seqlen, padded.min_seqlen, padded.padding) == (3, 2, 4)
    assert (padded.seqstart_py, padded.seqlen_py) == ([0, 4, 8, 12], [2, 3, 2])
    assert torch.equal(padded.seqlen, torch.tensor([2, 3, 2], dtype=torch.int32))
    assert padded.intervals() == [(0, 2), (4, 7), (8, 10)]


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_lists_of_tensors_come_back_as_they_were(shapes: list[tuple[int, int, int]]) -> None:
    queries = [torch.randn(batch, m, 2, 3) for batch, m, _ in shapes]
    keys = [torch.randn(batch, n, 2, 3) for batch, _, n in shapes]
    values = [torch.randn(batch, n, 5) for batch, _, n in shapes]
    bias, q, k, v = ab.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, values)
    assert v is not None
    for joined, original, split in (
        (q, queries, bias.split_queries),
        (k, keys, bias.split_kv),
        (v, values, bias.split_kv),
    ):
        assert joined.shape[0] == 1
        assert all(torch.equal(a, b) for a, b in zip(split(joined), original, strict=True))
    same, x = ab.BlockDiagonalCausalMask.from_tensor_list(queries)
    assert isinstance(same, ab.BlockDiagonalCausalMask)
    assert all(torch.equal(a, b) for a, b in zip(same.split(x), queries, strict=True))


def test_what_is_made_of_a_bias_splits_like_it() -> None:
    tensors = [torch.randn(2, 3, 1), torch.randn(1, 4, 1)]
    bias, x = ab.BlockDiagonalMask.from_tensor_list(tensors)
    made = [
        bias.make_causal(),
        bias.make_causal_from_bottomright(),
        bias.make_local_attention(2),
        bias.make_local_attention_from_bottomright(2),
    ]
    names = [
        "CausalMask",
        "CausalFromBottomRightMask",
        "CausalLocalAttentionMask",
        "CausalLocalAttentionFromBottomRightMask",
    ]
    assert [type(one).__name__ for one in made] == [f"BlockDiagonal{name}" for name in names]
    for one in made:
        assert [part.shape for part in one.split(x)] == [(2, 3, 1), (1, 4, 1)]


def test_without_tensors_a_split_gives_one_piece_for_each_sequence() -> None:
    bias = ab.BlockDiagonalMask.from_seqlens([2, 0, 3])
    assert [piece.shape for piece in bias.split(torch.randn(1, 5, 2))] == [(1, 2, 2), (1, 0, 2), (1, 3, 2)]


def test_a_split_of_what_does_not_lie_like_the_bias_is_refused() -> None:
    bias = ab.BlockDiagonalMask.from_seqlens([2, 3], [1, 1])
    with pytest.raises(InvalidArgumentError, match="use split_queries or split_kv"):
        bias.split(torch.zeros(1, 5, 1))
    with pytest.raises(InvalidArgumentError, match=r"tensor has shape \[1, 4, 1\]; this bias divides \[1, 5, ...\]"):
        bias.split_queries(torch.zeros(1, 4, 1))
    with pytest.raises(InvalidArgumentError, match=r"tensor has shape \[2, 2, 1\]; this bias divides \[1, 2, ...\]"):
        bias.split_kv(torch.zeros(2, 2, 1))


def test_lengths_may_be_a_tensor() -> None:
    bias = ab.BlockDiagonalMask.from_seqlens(torch.tensor([2, 3]), torch.tensor([4, 1]))
    assert bias.k_seqinfo.seqstart_py == [0, 4, 5]


def test_moving_a_bias_moves_its_tensors() -> None:
    tables = torch.zeros(1, 2, dtype=torch.int32)
    paged = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [3], tables, 2).to("meta")
    assert paged.block_tables.device.type == paged.k_seqinfo.seqlen.device.type == "meta"
    assert paged.q_seqinfo.seqstart.device.type == paged.k_seqinfo.seqstart.device.type == "meta"
    assert paged.k_seqinfo.seqlen_py == [3]
    assert ab.BlockDiagonalMask.from_seqlens([1], device="meta").q_seqinfo.seqstart.device.type == "meta"
    assert torch.equal(ab.BlockDiagonalMask.from_seqlens([1]).to("cpu").q_seqinfo.seqstart, torch.tensor([0, 1]))
    assert ab.LowerTriangularMask().add_bias(torch.zeros(1)).to("meta").bias.device.type == "meta"
    assert isinstance(ab.LowerTriangularFromBottomRightMask().to("meta"), ab.LowerTriangularFromBottomRightMask)


TABLES = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(0), "window_size is 0;"),
        (lambda: ab.LocalAttentionFromBottomRightMask(-1, 0), "window_left is -1;"),
        (lambda: ab.LocalAttentionFromBottomRightMask(0, -1), "window_right is -1;"),
        (lambda: ab.LowerTriangularMaskWithTensorBias(None), "bias is of type NoneType;"),
        (lambda: ab.BlockDiagonalMask.from_seqlens([1, -2]), r"q_seqlen\[1\] is -2;"),
        (lambda: ab.BlockDiagonalMask.from_seqlens([1], [1.5]), r"kv_seqlen\[0\] is 1.5;"),
        (lambda: ab.BlockDiagonalMask.from_seqlens(3), "q_seqlen is of type int;"),
        (lambda: ab.BlockDiagonalMask.from_seqlens([1, 2], [3]), "among 2 sequences and the keys among 1;"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([]), "tensors_q holds 0 tensors and tensors_q 0;"),
        (
            lambda: ab.BlockDiagonalMask.from_tensor_lists_qkv([torch.zeros(1, 2)], [torch.zeros(2, 2)]),
            r"tensors_k\[0\] has shape \[2, 2\] and tensors_q\[0\] \[1, 2\];",
        ),
        (
            lambda: ab.BlockDiagonalMask.from_tensor_lists_qkv(*[[torch.zeros(1, 2)]] * 2, [torch.zeros(1, 3)]),
            r"tensors_v\[0\] has shape \[1, 3\] and tensors_k\[0\] \[1, 2\];",
        ),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([torch.zeros(0, 2)]), "must be equal and not 0"),
        (
            lambda: ab.BlockDiagonalMask.from_seqlens([5], [2]).make_causal_from_bottomright(),
            "Sequence 0 has 5 queries",
        ),
        (lambda: ab.BlockDiagonalMask.from_seqlens([2]).make_local_attention(0), "window_size is 0;"),
        (lambda: ab.BlockDiagonalMask.from_seqlens([2]).make_local_attention_from_bottomright(0), "window_size is 0;"),
        (lambda: ab.BlockDiagonalMask.from_seqlens([5], [2]).make_local_attention(3), "its last query sees no key"),
        (lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5]), r"kv_seqlen is \[5\] and padding 4;"),
        (lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], -4, [0]), "kv_padding is -4;"),
        (
            lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [4]).make_local_attention(-1, 0),
            "window_left is -1;",
        ),
        (
            lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([1], 4, [4], 0),
            "window_size is 0;",
        ),
        (lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [1, 1], TABLES, 0), "page_size is 0;"),
        (
            lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [1], TABLES, 2),
            r"block_tables has shape \[2, 3\];",
        ),
        (lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [1, 7], TABLES, 2), r"kv_seqlen is \[1, 7\]"),
        (
            lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [1, 1], TABLES.float(), 2),
            "block_tables has dtype torch.float32",
        ),
        (lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [1], [[0]], 2), "block_tables is of type list;"),
    ],
)
def test_what_cannot_be_made_is_refused(make, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_the_errors_are_value_errors_as_xformers_are() -> None:
    with pytest.raises(ValueError, match="window_size is -1"):
        ab.LowerTriangularFromBottomRightMask().make_local_attention(-1)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="materialize"):
        ab.AttentionBias()  # type: ignore[abstract]


T = torch.ones(1, 3, 4, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ab.BlockDiagonalMask.from_seqlens([2**31, 5]), r"^q_seqlen takes 2147483653 places;"),
        (lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 2**30, [3, 3]), r"^kv_seqlen in rooms of 107"),
        (lambda: ab.BlockDiagonalMask.from_seqlens(torch.ones(2, device="meta")), r"^q_seqlen is on meta"),
        (lambda: ab.BlockDiagonalMask(5, 5), r"^q_seqinfo is of type int; make the bias with BlockDiagonalMask.from"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list(None), r"^tensors_q is of type NoneType;"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list("ab"), r"^tensors_q is of type str;"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list(["a"]), r"^tensors_q\[0\] is of type str;"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([torch.ones(3)]), r"^tensors_q\[0\] has dtype .* shape \[3\]"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([T, T[..., :4]]), r"^tensors_q\[1\] has dtype"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([T, T[..., 0]]), r"^tensors_q\[1\] has dtype"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([T, T.double()]), r"^tensors_q\[1\] has dtype torch.float64"),
        (lambda: ab.BlockDiagonalMask.from_tensor_list([T, T.to("meta")]), r"^tensors_q\[1\] .*on meta"),
        (lambda: ab.BlockDiagonalMask.from_seqlens([3]).split("x"), r"^tensor is of type str;"),
        (
            lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [3]).make_paged(
                torch.zeros(1, 2, dtype=torch.int32), 2, ab.BlockDiagonalMask
            ),
            r"^paged_type is <class",
        ),
    ],
)
def test_odd_sequences_are_refused_by_name(make, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_block_table_without_numbers_is_refused_where_it_is_read() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    bias = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [3], table, 2)
    with pytest.raises(InvalidArgumentError, match=r"^block_tables is on meta"):
        bias.materialize((1, 4))


def test_numpys_numbers_are_windows() -> None:
    three = np.int64(3)
    pairs = [
        (ab.LocalAttentionFromBottomRightMask(three, three), ab.LocalAttentionFromBottomRightMask(3, 3)),
        (
            ab.LowerTriangularFromBottomRightLocalAttentionMask(three),
            ab.LowerTriangularFromBottomRightLocalAttentionMask(3),
        ),
        (
            ab.BlockDiagonalMask.from_seqlens([three, 4]).make_local_attention(three),
            ab.BlockDiagonalMask.from_seqlens([3, 4]).make_local_attention(3),
        ),
    ]
    for numpys, pythons in pairs:
        assert torch.equal(numpys.materialize((7, 7)), pythons.materialize((7, 7)))
