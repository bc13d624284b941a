import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.attention.patterns import Causal, LocalWindow
from vllm_teach.attention.shapes import AttentionShape
from vllm_teach.attention.variant import Variant, VariantArguments, merge_masks
from vllm_teach.errors import InvalidArgumentError

SHAPE = AttentionShape(batch=2, q_len=5, kv_len=7, q_heads=4, kv_heads=2, head_dim=16)
CPU = torch.device("cpu")


def test_without_arguments_nothing_changes_the_formula():
    variant = Variant.of(SHAPE, CPU)
    assert (variant.scale, variant.pattern, variant.softcap) == (0.25, None, 0.0)
    assert (variant.alibi_slopes, variant.dropout_p, variant.dropout_seed) == (None, 0.0, 0)


def test_the_typed_arguments_are_those_of_the_function():
    parameters = inspect.signature(Variant.of).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert list(VariantArguments.__annotations__) == named


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="is_causal"):
        Variant.of(SHAPE, CPU, is_causal=True)


def test_numbers_become_floats():
    variant = Variant.of(SHAPE, CPU, scale=np.float32(0.5), softcap=3, dropout_p=0, dropout_seed=9)
    assert (variant.scale, variant.softcap, variant.dropout_p, variant.dropout_seed) == (0.5, 3.0, 0.0, 9)
    assert {type(x) for x in (variant.scale, variant.softcap, variant.dropout_p)} == {float}


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
    st.tuples(st.integers(-1, 10), st.integers(-1, 10)),
    st.sampled_from([None, Causal(), ~Causal(), LocalWindow(2, 1)]),
)
@settings(max_examples=300, deadline=None)
def test_the_merged_mask_shows_what_all_three_show(q_len, kv_len, causal, window, pattern):
    merged = merge_masks(causal, window, pattern)
    shown = None if merged is None else merged.mask(q_len, kv_len).tolist()
    offset = kv_len - q_len
    expected = [
        [
            (not causal or j <= i + offset)
            and (window[0] < 0 or j >= i + offset - window[0])
            and (window[1] < 0 or j <= i + offset + window[1])
            and (pattern is None or bool(pattern.sees(torch.tensor(i + offset), torch.tensor(j))))
            for j in range(kv_len)
        ]
        for i in range(q_len)
    ]
    assert expected == ([[True] * kv_len] * q_len if shown is None else shown)


def test_common_masks_have_one_form_each():
    assert merge_masks(False) is None
    assert merge_masks(True) == merge_masks(False, (-1, 0)) == merge_masks(True, [-1, 5]) == Causal()
    assert merge_masks(True, (3, -1)) == merge_masks(False, (3, 0)) == LocalWindow(3, 0)
    assert merge_masks(False, pattern=LocalWindow(2, 2)) == LocalWindow(2, 2)
    assert merge_masks(True, pattern=LocalWindow(2, 2)) == Causal() & LocalWindow(2, 2)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_slopes_are_kept_as_they_are(shape):
    slopes = torch.rand(shape)
    assert Variant.of(SHAPE, CPU, alibi_slopes=slopes).alibi_slopes is slopes


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("causal", 1, "causal is 1; give True or False."),
        ("causal", None, "causal is None; give True or False."),
        ("window_size", 3, "window_size is 3; give (left, right)"),
        ("window_size", (3,), "window_size is (3,); give (left, right)"),
        ("window_size", (-2, 0), "window_size[0] is -2; give"),
        ("window_size", (0, 1.5), "window_size[1] is 1.5; give"),
        ("pattern", torch.ones(5, 7).bool(), "pattern is of type Tensor; give a Pattern"),
        ("pattern", Causal, "pattern is of type ABCMeta; give a Pattern"),
        ("scale", math.nan, "scale is nan; give a finite number"),
        ("softcap", -1.0, "softcap is -1.0; give 0 for none, or a number from 1e-30."),
        ("softcap", math.inf, "softcap is inf; give a finite number"),
        ("softcap", None, "softcap is of type NoneType; give a finite number"),
        ("alibi_slopes", [0.5] * 4, "alibi_slopes is of type list; give a tensor of float32, or None."),
        (
            "alibi_slopes",
            torch.ones(4).half(),
            "alibi_slopes has dtype torch.float16 and shape [4]; it must be float32",
        ),
        (
            "alibi_slopes",
            torch.ones(2),
            "alibi_slopes has dtype torch.float32 and shape [2]; it must be float32 of shape",
        ),
        ("alibi_slopes", torch.ones(1, 4), "shape [1, 4]; it must be float32 of shape [4] or [2, 4]."),
        ("alibi_slopes", torch.ones(4, device="meta"), "alibi_slopes is on meta and q on cpu; move one to the other."),
        ("dropout_p", 1.0, "dropout_p is 1.0; give a probability"),
        ("dropout_seed", -1, "dropout_seed is -1; give a whole number"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(argument, value, words):
    with pytest.raises(InvalidArgumentError) as raised:
        Variant.of(SHAPE, CPU, **{argument: value})
    assert words in str(raised.value)


def test_one_call_draws_one_seed():
    torch.manual_seed(0)
    first, second = (Variant.of(SHAPE, CPU, dropout_p=0.5).dropout_seed for _ in range(2))
    assert first != second
    torch.manual_seed(0)
    assert Variant.of(SHAPE, CPU, dropout_p=0.5).dropout_seed == first
