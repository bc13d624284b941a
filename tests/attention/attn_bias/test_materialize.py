"""Each bias written out as a tensor, against what its docstring says, pair by pair."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention import attn_bias as ab
from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.variant import merge_masks
from vllm_teach.errors import InvalidArgumentError

# What a query sees of its own sequence: query i of m, key j of n.
Rule = Callable[[int, int, int, int], bool]


def joined(q_lens: Sequence[int], key_places: Sequence[Sequence[int]], slots: int, rule: Rule) -> torch.Tensor:
    """The mask of several sequences, pair by pair: each at its rows, and at its keys' places."""
    mask = torch.zeros(sum(q_lens), slots, dtype=torch.bool)
    for sequence, (q_len, places) in enumerate(zip(q_lens, key_places, strict=True)):
        first = sum(q_lens[:sequence])
        for i in range(q_len):
            for j, place in enumerate(places):
                mask[first + i, place] = rule(i, j, q_len, len(places))
    return mask


def everything(i: int, j: int, m: int, n: int) -> bool:
    return True


def top_left(i: int, j: int, m: int, n: int) -> bool:
    return j <= i


def bottom_right(i: int, j: int, m: int, n: int) -> bool:
    return j - n <= i - m


def top_left_window(w: int) -> Rule:
    return lambda i, j, m, n: i - w < j <= i


def bottom_right_window(w: int) -> Rule:
    return lambda i, j, m, n: i - m - w < j - n <= i - m


def bottom_right_local(left: int, right: int) -> Rule:
    return lambda i, j, m, n: i - m - left <= j - n <= i - m + right


WHOLE: list[tuple[ab.AttentionBias, Rule]] = [
    (ab.LowerTriangularMask(), top_left),
    (ab.LowerTriangularFromBottomRightMask(), bottom_right),
    *((ab.LowerTriangularFromBottomRightMask().make_local_attention(w), bottom_right_window(w)) for w in (1, 3)),
    *((ab.LocalAttentionFromBottomRightMask(a, b), bottom_right_local(a, b)) for a, b in ((0, 0), (2, 1), (0, 3))),
]


@pytest.mark.parametrize(
    ("bias", "rule"), WHOLE, ids=lambda x: type(x).__name__ if isinstance(x, ab.AttentionBias) else ""
)
@pytest.mark.parametrize(("q_len", "kv_len"), list(itertools.product([0, 1, 3, 6], repeat=2)))
def test_biases_of_the_whole_matrix(bias: ab.AttentionBias, rule: Rule, q_len: int, kv_len: int) -> None:
    visible = joined([q_len], [range(kv_len)], kv_len, rule)
    for shape in ((q_len, kv_len), (2, 3, q_len, kv_len)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tensor = bias.materialize(shape, dtype)
            assert tensor.dtype == dtype
            assert tensor.shape == shape
            assert torch.equal(tensor == 0, visible.expand(shape))
            assert torch.equal(tensor == -math.inf, ~visible.expand(shape))


def test_top_left_and_bottom_right_differ_unless_square() -> None:
    top, bottom = ab.LowerTriangularMask(), ab.LowerTriangularFromBottomRightMask()
    assert torch.equal(top.materialize((5, 5)), bottom.materialize((5, 5)))
    decode = (1, 5)  # one new query after five keys: top-left, it would see the first alone
    assert (top.materialize(decode) == 0).tolist() == [[True, False, False, False, False]]
    assert (bottom.materialize(decode) == 0).all()


def test_xformers_windows_count_the_querys_own_key_and_flash_attentions_do_not() -> None:
    shape, window = (4, 9), 3
    xformers = ab.LowerTriangularFromBottomRightLocalAttentionMask(window).materialize(shape) == 0
    assert xformers.sum(dim=1).tolist() == [3, 3, 3, 3]
    flash_attention = merge_masks(causal=True, window_size=(window - 1, 0))
    assert isinstance(flash_attention, LocalWindow)
    assert torch.equal(xformers, flash_attention.mask(*shape))
    assert torch.equal(xformers, ab.LocalAttentionFromBottomRightMask(window - 1, 0).materialize(shape) == 0)


def test_a_tensor_bias_is_added_below_the_diagonal() -> None:
    bias = torch.randn(2, 3, 4, 6)
    tensor = ab.LowerTriangularMask().add_bias(bias).materialize((2, 3, 4, 6))
    visible = torch.ones(4, 6, dtype=torch.bool).tril()
    assert torch.equal(tensor[:, :, visible], bias[:, :, visible])
    assert (tensor[:, :, ~visible] == -math.inf).all()


PAGED: dict[type[ab.PagedBlockDiagonalPaddedKeysMask], Rule] = {
    ab.PagedBlockDiagonalPaddedKeysMask: everything,
    ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask: bottom_right,
}
LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=4)


def check(bias: ab.AttentionBias, visible: torch.Tensor) -> None:
    tensor = bias.materialize((1, 2, *visible.shape))
    assert tensor.shape == (1, 2, *visible.shape)
    assert torch.equal(tensor == 0, visible.expand_as(tensor))
    assert torch.equal(tensor == -math.inf, ~visible.expand_as(tensor))


def behind_one_another(kv_lens: Sequence[int]) -> list[range]:
    ends = list(itertools.accumulate(kv_lens))
    return [range(end - length, end) for end, length in zip(ends, kv_lens, strict=True)]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, window=st.integers(1, 4))
def test_sequences_behind_one_another(lengths: list[tuple[int, int]], window: int) -> None:
    q_lens, kv_lens = [m for m, _ in lengths], [n for _, n in lengths]
    places, slots = behind_one_another(kv_lens), sum(kv_lens)
    bias = ab.BlockDiagonalMask.from_seqlens(q_lens, kv_lens)
    check(bias, joined(q_lens, places, slots, everything))
    check(bias.make_causal(), joined(q_lens, places, slots, top_left))
    check(ab.BlockDiagonalCausalMask.from_seqlens(q_lens, kv_lens), joined(q_lens, places, slots, top_left))
    if all(m <= n for m, n in lengths):
        check(bias.make_causal_from_bottomright(), joined(q_lens, places, slots, bottom_right))
        check(
            bias.make_local_attention_from_bottomright(window),
            joined(q_lens, places, slots, bottom_right_window(window)),
        )
    else:
        with pytest.raises(InvalidArgumentError, match=r"Sequence \d has \d queries and \d keys;"):
            bias.make_causal_from_bottomright()
    if all(m - window < n for m, n in lengths):
        check(bias.make_local_attention(window), joined(q_lens, places, slots, top_left_window(window)))
    else:
        with pytest.raises(InvalidArgumentError, match="its last query sees no key"):
            bias.make_local_attention(window)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, spare=st.integers(0, 2), window=st.integers(1, 4))
def test_sequences_in_rooms_of_equal_size(lengths: list[tuple[int, int]], spare: int, window: int) -> None:
    q_lens, kv_lens = [m for m, _ in lengths], [n for _, n in lengths]
    padding = max(kv_lens, default=0) + spare
    places = [range(i * padding, i * padding + n) for i, n in enumerate(kv_lens)]
    slots = padding * len(lengths)
    plain = ab.BlockDiagonalPaddedKeysMask.from_seqlens(q_lens, padding, kv_lens)
    causal = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=q_lens, kv_padding=padding, kv_seqlen=kv_lens, causal_diagonal=None
    )
    check(plain, joined(q_lens, places, slots, everything))
    check(causal, joined(q_lens, places, slots, bottom_right))
    check(plain.make_local_attention(window, 1), joined(q_lens, places, slots, bottom_right_local(window, 1)))
    local = ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(q_lens, padding, kv_lens, window, 0)
    check(local, joined(q_lens, places, slots, bottom_right_local(window, 0)))
    windowed = ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(q_lens, padding, kv_lens, window)
    check(windowed, joined(q_lens, places, slots, bottom_right_window(window)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=LENGTHS, page_size=st.integers(1, 4))
def test_sequences_in_pages(data: st.DataObject, lengths: list[tuple[int, int]], page_size: int) -> None:
    q_lens, kv_lens = [m for m, _ in lengths], [n for _, n in lengths]
    columns = max((-(-n // page_size) for n in kv_lens), default=0) + data.draw(st.integers(0, 1))
    num_pages = columns * len(lengths) + data.draw(st.integers(0, 2))
    pages = data.draw(st.permutations(range(num_pages)))
    tables = [pages[i * columns : (i + 1) * columns] for i in range(len(lengths))]
    block_tables = torch.tensor(tables, dtype=torch.int32).reshape(len(lengths), columns)
    used = [-(-n // page_size) for n in kv_lens]
    for row, count in enumerate(used):
        block_tables[row, count:] = -7  # what follows the last page in use is not read
    places = [[tables[i][j // page_size] * page_size + j % page_size for j in range(n)] for i, n in enumerate(kv_lens)]
    for paged, rule in PAGED.items():
        visible = joined(q_lens, places, num_pages * page_size, rule)
        check(paged.from_seqlens(q_lens, kv_lens, block_tables, page_size), visible)
        unpaged = ab.BlockDiagonalPaddedKeysMask.from_seqlens(q_lens, columns * page_size, kv_lens)
        check(unpaged.make_paged(block_tables, page_size, paged), visible)


def test_a_shifted_pattern_is_exact_in_its_tile_maps() -> None:
    for by, pattern in itertools.product([-5, 0, 3], [Causal(), LocalWindow(2, 1)]):
        shifted = ab.Shifted(pattern, by)
        expected = torch.zeros(9, 12, dtype=torch.bool)
        for i, j in itertools.product(range(9), range(12)):
            expected[i, j] = pattern.sees(torch.tensor(i + 12 - 9 + by), torch.tensor(j))
        assert torch.equal(shifted.mask(9, 12), expected)
        q_pos, k_pos = torch.arange(9)[:, None] + 3, torch.arange(12)[None]
        assert torch.equal(shifted.rule(torch.device("cpu"))(q_pos, k_pos), expected)
        kinds = shifted.tile_map(9, 12, 4, 5)
        for a, b in itertools.product(range(3), range(3)):
            tile = expected[4 * a : 4 * a + 4, 5 * b : 5 * b + 5]
            assert kinds[a, b] == (2 if tile.all() else 1 if tile.any() else 0)


def test_shapes_that_a_bias_is_not_made_for_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape is \(5,\);"):
        ab.LowerTriangularMask().materialize((5,))
    with pytest.raises(InvalidArgumentError, match=r"dtype is torch.int32;"):
        ab.LowerTriangularMask().materialize((5, 5), torch.int32)
    bias = ab.BlockDiagonalMask.from_seqlens([2, 3], [4, 1])
    with pytest.raises(InvalidArgumentError, match=r"shape\[-2\] of \[4, 5\] has 4 tokens and .*BlockDiagonalMask.* 5"):
        bias.materialize((4, 5))
    with pytest.raises(InvalidArgumentError, match=r"shape\[-1\] of \[5, 6\] has 6 tokens"):
        bias.materialize((5, 6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ab.LowerTriangularMask().materialize(5), r"^shape is 5;"),
        (lambda: ab.LowerTriangularMask().materialize((-1, 5, 5)), r"^shape\[0\] is -1;"),
        (lambda: ab.LowerTriangularMask().materialize((2.0, 5, 5)), r"^shape\[0\] is 2.0;"),
        (lambda: ab.LowerTriangularMask().materialize((5, 5), "float32"), r"^dtype is 'float32';"),
        (lambda: ab.LowerTriangularMask().materialize((5, 5), torch.float8_e4m3fn), r"^dtype is torch.float8"),
        (lambda: ab.LowerTriangularMask().add_bias(torch.ones(3)).materialize((5, 5)), r"^shape is \[5, 5\] and bias"),
        (
            lambda: ab.LowerTriangularMask().add_bias(torch.ones(2, 1, 5, 5)).materialize((5, 5)),
            r"^shape is \[5, 5\] and bias has \[2, 1, 5, 5\];",
        ),
        (
            lambda: ab.LowerTriangularMask().add_bias(torch.ones(5, 5, device="meta")).materialize((5, 5)),
            r"^bias is on meta",
        ),
    ],
)
def test_what_cannot_be_materialised_is_refused_by_name(make, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_mask_with_a_tensor_has_the_dtype_that_was_asked_for() -> None:
    bias = ab.LowerTriangularMask().add_bias(torch.ones(5, 5))
    assert bias.materialize((2, 5, 5), torch.bfloat16).dtype == torch.bfloat16
