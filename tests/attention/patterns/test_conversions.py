"""Patterns in other libraries' words: the same pairs are seen."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vllm_teach.attention.patterns import (
    Banded,
    BlockSparsePattern,
    Causal,
    Documents,
    GlobalTokens,
    LocalWindow,
    Strided,
    as_band,
    to_block_mask,
    to_flash_arguments,
    to_mask_mod,
    why_not_flash,
)
from vllm_teach.errors import InvalidArgumentError

NOT_BANDS = [
    GlobalTokens(3) | LocalWindow(20),
    (Strided(5) | LocalWindow(5)) & Causal(),
    Banded(3, 4),
    Documents([0, 50, 50, 90, 300]) & Causal(),
    BlockSparsePattern.random(8, 40, density=0.4) & Causal(),
    ~LocalWindow(30, 3),
]


@pytest.mark.parametrize("pattern", [Causal(), LocalWindow(40, 9), *NOT_BANDS], ids=repr)
@pytest.mark.parametrize(("q_len", "kv_len", "size"), [(128, 128, 64), (150, 200, 64), (200, 150, 32), (1, 200, 128)])
def test_block_masks_are_those_that_torch_makes_pair_by_pair(pattern, q_len, kv_len, size) -> None:
    ours = to_block_mask(pattern, q_len, kv_len, block_size=size)
    mod = to_mask_mod(pattern, q_len, kv_len)
    theirs = create_block_mask(mod, 1, 1, q_len, kv_len, device="cpu", BLOCK_SIZE=size)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_mask_mods_agree_with_the_definition(data, patterns, lengths, mask_by_definition) -> None:
    pattern, (q_len, kv_len) = data.draw(patterns), data.draw(lengths)
    zero = torch.tensor(0)
    mod = to_mask_mod(pattern, q_len, kv_len)
    found = mod(zero, zero, torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :])
    assert torch.equal(found, mask_by_definition(pattern, q_len, kv_len))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pattern", [NOT_BANDS[0], NOT_BANDS[3], NOT_BANDS[4]], ids=repr)
def test_flex_attention_sees_the_same_keys(pattern) -> None:
    q_len, kv_len = 100, 130
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (q_len, kv_len, kv_len))
    block_mask = to_block_mask(pattern, q_len, kv_len, block_size=(64, 32))
    out = flex_attention(q, k, v, block_mask=block_mask)
    scores = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(~pattern.mask(q_len, kv_len), float("-inf"))
    assert torch.allclose(out, scores.softmax(dim=-1) @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 4), (4, 0)])
def test_flex_attention_has_no_empty_masks(q_len, kv_len) -> None:
    with pytest.raises(InvalidArgumentError, match="is 0; FlexAttention"):
        to_block_mask(Causal(), q_len, kv_len)


BANDS = [
    (None, (-1, -1)),
    (Causal(), (-1, 0)),
    (LocalWindow(511), (511, 0)),
    (LocalWindow(3, 4), (3, 4)),
    (LocalWindow(-1, -1), (-1, -1)),
    (Banded(3), (3, 3)),
    (Banded(0, 7), (0, 0)),
    (Banded(3) & Causal(), (3, 0)),
    (LocalWindow(5, 2) & LocalWindow(-1, 4) & LocalWindow(7, -1), (5, 2)),
    (Causal() & (LocalWindow(9, 9) & Causal()), (9, 0)),
]


@pytest.mark.parametrize(("pattern", "band"), BANDS, ids=repr)
def test_bands(pattern, band) -> None:
    assert as_band(pattern) == band
    if pattern is not None:
        for lengths in ((9, 9), (3, 12), (12, 5)):
            assert torch.equal(pattern.mask(*lengths), LocalWindow(*band).mask(*lengths))


@pytest.mark.parametrize("pattern", [*NOT_BANDS, Causal() & Strided(2), Causal() | LocalWindow(3)], ids=repr)
def test_no_bands(pattern) -> None:
    assert as_band(pattern) is None


def flash_mask(causal: bool, window_size: tuple[int, int], q_len: int, kv_len: int) -> torch.Tensor:
    """FlashAttention 2's documented mask, written out."""
    left, right = window_size
    right = 0 if causal else right
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    mask = mask if right < 0 else mask.tril(kv_len - q_len + right)
    return mask if left < 0 else mask.triu(kv_len - q_len - left)


@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 20), (3, 20), (20, 3), (1, 20), (0, 3)])
def test_flash_arguments_show_the_same_keys(q_len, kv_len) -> None:
    for pattern, _ in BANDS:
        arguments = to_flash_arguments(pattern, q_len, kv_len)
        assert arguments is not None
        assert why_not_flash(pattern, q_len, kv_len) is None
        expected = torch.ones(q_len, kv_len, dtype=torch.bool) if pattern is None else pattern.mask(q_len, kv_len)
        assert torch.equal(flash_mask(**arguments, q_len=q_len, kv_len=kv_len), expected)


def test_flash_arguments_are_the_usual_words() -> None:
    assert to_flash_arguments(Causal(), 9, 9) == {"causal": True, "window_size": (-1, -1)}
    assert to_flash_arguments(LocalWindow(4), 9, 9) == {"causal": True, "window_size": (4, 0)}
    assert to_flash_arguments(LocalWindow(4, 2), 9, 9) == {"causal": False, "window_size": (4, 2)}
    # a pattern that hides nothing at these lengths, whatever it is
    assert to_flash_arguments(Documents([0, 9, 12]), 9, 9) == {"causal": False, "window_size": (-1, -1)}


@pytest.mark.parametrize("pattern", NOT_BANDS, ids=repr)
def test_why_not_flash(pattern) -> None:
    assert to_flash_arguments(pattern, 200, 200) is None
    reason = why_not_flash(pattern, 200, 200)
    assert reason is not None
    assert repr(pattern) in reason


@pytest.mark.parametrize("convert", [to_block_mask, to_mask_mod, to_flash_arguments, why_not_flash])
def test_only_patterns_of_possible_lengths_are_converted(convert):
    for odd in ("causal", Causal):
        with pytest.raises(InvalidArgumentError, match=r"^pattern is of type .*; give a Pattern"):
            convert(odd, 5, 5)
    with pytest.raises(InvalidArgumentError, match=r"^q_len is -1;"):
        convert(Causal(), -1, 5)
    with pytest.raises(InvalidArgumentError, match=r"^kv_len is 2.5;"):
        convert(Causal(), 5, 2.5)
    with pytest.raises(InvalidArgumentError, match=r"^cu_seqlens ends with 4 and kv_len is 5;"):
        convert(Documents([0, 4]), 5, 5)


def test_a_block_size_is_one_whole_number_or_two():
    for size in (np.int64(2), [2, 2], (2, np.int32(2))):
        assert torch.equal(
            to_block_mask(Causal(), 5, 5, block_size=size).kv_indices,
            to_block_mask(Causal(), 5, 5, block_size=2).kv_indices,
        )
    for size in ((2,), 2.0, "22", (2, 0), None):
        with pytest.raises(InvalidArgumentError, match=r"^block_size is "):
            to_block_mask(Causal(), 5, 5, block_size=size)
