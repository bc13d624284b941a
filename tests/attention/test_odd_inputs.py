"""What every attention does alike with inputs that are odd: refuse them by name, or give what float64 naive gives."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from vllm_teach.attention import (
    chunked_attention,
    flash_attention,
    flash_attention_forward,
    flash_attn_func,
    memory_efficient_attention,
    naive_attention,
    split_kv_attention,
)
from vllm_teach.attention.patterns import (
    Banded,
    BlockSparsePattern,
    Causal,
    Documents,
    GlobalTokens,
    LocalWindow,
    Strided,
    tile_csr,
)
from vllm_teach.errors import InvalidArgumentError


def split(*qkv, **arguments):
    return split_kv_attention(*qkv, **arguments)[0]


def forward(*qkv, **arguments):
    return flash_attention_forward(*qkv, **arguments)[0]


DENSE = {
    "naive": naive_attention,
    "flash": flash_attention,
    "forward": forward,
    "chunked": chunked_attention,
    "split": split,
}
ALL = {**DENSE, "flash_attn_func": flash_attn_func, "memory_efficient": memory_efficient_attention}
RECOMPUTING = {
    "flash": flash_attention,
    "chunked": chunked_attention,
    "flash_attn_func": flash_attn_func,
    "memory_efficient": memory_efficient_attention,
}
each = pytest.mark.parametrize("attend", DENSE.values(), ids=DENSE)
each_recomputing = pytest.mark.parametrize("attend", RECOMPUTING.values(), ids=RECOMPUTING)
X = torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(0))


def error_against_float64(attend, q, k, v, **arguments):
    truth = naive_attention(q.double(), k.double(), v.double(), **arguments)
    return (attend(q, k, v, **arguments) - truth).abs().max().item()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("make_odd", "kind"),
    [
        (lambda: X.to_sparse(), "of layout torch.sparse_coo"),
        (lambda: X.to_mkldnn(), "of layout torch._mkldnn"),
        (lambda: torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided), "nested"),
        (lambda: torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "mkldnn", "nested", "jagged"],
)
@pytest.mark.parametrize("attend", ALL.values(), ids=ALL)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # a prototype, PyTorch says
def test_a_tensor_that_is_not_dense_is_refused_by_name(attend, make_odd, kind, place) -> None:
    qkv = [X, X, X]
    qkv[place] = make_odd()
    name = ("query", "key", "value")[place] if attend is memory_efficient_attention else "qkv"[place]
    with pytest.raises(InvalidArgumentError, match=rf"^{name} is {kind}; give a dense tensor .*\.$"):
        attend(*qkv)


@each
@pytest.mark.parametrize(
    ("numpys", "pythons"),
    [
        ({"window_size": (np.int64(2), np.int8(1))}, {"window_size": (2, 1)}),
        ({"scale": np.float32(0.25)}, {"scale": 0.25}),
        ({"scale": Fraction(1, 4)}, {"scale": 0.25}),
        ({"softcap": np.float16(2)}, {"softcap": 2.0}),
        ({"pattern": Banded(np.int8(100), np.int8(2))}, {"pattern": Banded(100, 2)}),
        ({"pattern": LocalWindow(np.int64(1), np.int32(-1))}, {"pattern": LocalWindow(1, -1)}),
        ({"pattern": Documents([np.int64(0), np.int32(3), 5])}, {"pattern": Documents([0, 3, 5])}),
    ],
    ids=str,
)
def test_numpys_numbers_are_numbers(attend, numpys, pythons) -> None:
    assert torch.equal(attend(X, X, X, **numpys), attend(X, X, X, **pythons))


def test_numpys_numbers_are_numbers_to_dropout_too() -> None:
    numpys = {"dropout_p": np.float32(0.25), "dropout_seed": np.int64(3)}
    for attend in (naive_attention, flash_attention, chunked_attention):
        assert torch.equal(attend(X, X, X, **numpys), attend(X, X, X, dropout_p=0.25, dropout_seed=3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalWindow(2**63), r"^left is above 2\*\*62; give a whole number from -1 to that\.$"),
        (lambda: GlobalTokens(10**30), r"^n is above"),
        (lambda: Strided(10**5000), r"^stride is above"),  # Python refuses to write so long a number out
        (lambda: Banded(1, 2**70), r"^dilation is above"),
        (lambda: BlockSparsePattern([[1, 1], [1, 1]], 2**62), r"^block is 4611686018427387904, which times 2 blocks"),
        (lambda: Documents([0, 2**40]), r"^cu_seqlens ends with 1099511627776;"),
        (lambda: flash_attention(X, X, X, window_size=(2**70, 0)), r"^window_size\[0\] is above"),
        (lambda: flash_attention(X, X, X, tile_q=2**70), r"^tile_q is above"),
        (lambda: chunked_attention(X, X, X, q_chunk=2**70), r"^q_chunk is above"),
        (lambda: flash_attention(X, X, X, first_batch=2**31), r"^first_batch is 2147483648, and .* 2\*\*32 apart\.$"),
        (
            lambda: naive_attention(X, X, X, first_batch=2**31, dropout_p=0.5, dropout_seed=0),
            r"^first_batch is 2147483648",
        ),
        (
            lambda: chunked_attention(X, X, X, first_batch=2**63, dropout_p=0.5, dropout_seed=0),
            r"^first_batch is above",
        ),
        (lambda: naive_attention(X, X, X, softcap=1e39), r"^softcap is 1e\+39"),
        (lambda: naive_attention(X, X, X, softcap=1e-50), r"^softcap is 1e-50; give 0 for none, or a number from"),
        (lambda: naive_attention(X, X, X, scale=1e300), r"^scale is 1e\+300"),
        (lambda: tile_csr(Causal(), 5, 5, 2**20, 2**20), r"^tile_q is 1048576 and tile_k 1048576;"),
    ],
)
def test_a_number_that_cannot_be_counted_with_is_refused_by_name(make, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


@each
@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 1e30},
        {"softcap": 1e-30},
        {"scale": 0.0},
        {"scale": -1.5},
        {"scale": 1e-300},
        {"window_size": (2**62, 2**62)},
        {"pattern": Strided(2**62)},
        {"pattern": Banded(2**62, 2**62)},
        {"pattern": GlobalTokens(2**62)},
        {"pattern": BlockSparsePattern([[1]], 2**62)},
        {"alibi_slopes": torch.ones(1).expand(2)},
    ],
    ids=str,
)
def test_the_largest_and_smallest_numbers_give_what_float64_gives(attend, arguments) -> None:
    assert error_against_float64(attend, X, X, X, **arguments) <= 1e-5


@pytest.mark.parametrize("tile", [10**6, 2**40, 2**62])
def test_a_tile_may_be_larger_than_the_matrix(tile) -> None:
    """Also where all of its pairs are looked at: none is made that does not exist."""
    pattern = GlobalTokens(1) | LocalWindow(1)
    assert error_against_float64(flash_attention, X, X, X, pattern=pattern) <= 1e-5
    big = {"flash": {"tile_q": tile, "tile_k": tile}, "chunked": {"q_chunk": tile, "k_chunk": tile}}
    want = naive_attention(X, X, X, pattern=pattern)
    assert torch.allclose(flash_attention(X, X, X, pattern=pattern, **big["flash"]), want, atol=1e-6)
    assert torch.allclose(chunked_attention(X, X, X, pattern=pattern, **big["chunked"]), want, atol=1e-6)
    assert pattern.tile_map(5, 7, tile, tile).tolist() == [[1]]


@each
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (5, 5)])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_is_a_batch_and_a_length_too(attend, batch, lengths) -> None:
    q, k = torch.randn(batch, lengths[0], 4, 8), torch.randn(batch, lengths[1], 2, 8)
    arguments = {"pattern": GlobalTokens(1) | LocalWindow(1), "alibi_slopes": torch.ones(batch, 4), "softcap": 2.0}
    if attend is not split:
        arguments |= {"dropout_p": 0.5, "dropout_seed": 1}
    out = attend(q, k, k, **arguments)
    assert out.shape == q.shape
    assert torch.allclose(out, naive_attention(q, k, k, **arguments), atol=1e-6)


@each
@pytest.mark.parametrize(
    "pattern",
    [
        Strided(37) & Causal(),
        GlobalTokens(2) | LocalWindow(37),
        BlockSparsePattern([[1, 0, 1], [1, 1, 0], [0, 1, 1]], 5),
        Documents([0, 3, 9, 37]),
    ],
    ids=str,
)
def test_a_default_device_does_not_reach_inside(attend, pattern) -> None:
    """`torch.set_default_device` is for what a caller makes: the tensors here say themselves where they are."""
    want = naive_attention(X.double(), X.double(), X.double(), pattern=pattern)
    density = pattern.mask(11, 13).double().mean().item()
    with torch.device("meta"):
        out = attend(X, X, X, pattern=pattern)
        assert math.isclose(pattern.density(11, 13), density)
        assert tile_csr(pattern, 11, 13, 4, 4).masks.device.type == "cpu"
        if attend is not split:
            attend(X, X, X, pattern=pattern, dropout_p=0.5)
    assert (out - want).abs().max() <= 1e-5
    assert pattern.tile_map(5, 5, 2, 2).device.type == "cpu"


@each_recomputing
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda q: f(q).sum())(X),
        lambda f: torch.func.vmap(f)(torch.stack([X, X])),
        lambda f: torch.func.jvp(f, (X,), (X,)),
        lambda f: torch.func.jacrev(f)(X),
    ],
    ids=["grad", "vmap", "jvp", "jacrev"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, in its jvp
def test_torch_func_is_refused_with_a_way_out(attend, transform) -> None:
    with pytest.raises(InvalidArgumentError, match=r"torch\.func .*use naive_attention there\.$"):
        transform(lambda q: attend(q, X, X))


def test_naive_attention_is_the_way_out() -> None:
    want = X.clone().requires_grad_()
    naive_attention(want, X, X, causal=True).sum().backward()
    got = torch.func.grad(lambda q: naive_attention(q, X, X, causal=True).sum())(X)
    assert torch.allclose(got, want.grad)


@each_recomputing
def test_a_forward_mode_tangent_is_refused(attend) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(InvalidArgumentError, match=r"^v has a forward-mode tangent; use naive_attention for it\.$"):
            attend(X, X, dual)


@each_recomputing
def test_inference_tensors_are_refused_only_where_a_backward_pass_would_need_them(attend) -> None:
    with torch.inference_mode():
        made = X.clone()
        inside = attend(made, made, made)
    assert torch.equal(attend(made, X, X), inside)
    with pytest.raises(InvalidArgumentError, match=r"^k was made under torch.inference_mode .*clone it first\.$"):
        attend(X.clone().requires_grad_(), made, X)
    with torch.no_grad():
        assert torch.equal(attend(X.clone().requires_grad_(), made, X), inside)


def test_autocast_does_not_lower_the_oracles_precision() -> None:
    want = naive_attention(X, X, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(naive_attention(X, X, X), want)


def test_scores_that_are_all_minus_infinity_are_nothing_to_a_running_maximum_and_nan_to_the_formula() -> None:
    """Infinite keys may give such a row. A running maximum cannot tell it from a row that sees no key, which is 0."""
    q, k, v = torch.ones(1, 2, 1, 8), torch.full((1, 3, 1, 8), -math.inf), torch.ones(1, 3, 1, 8)
    assert naive_attention(q, k, v).isnan().all()  # 0 / 0
    for attend in (flash_attention, forward, chunked_attention, split, flash_attn_func, memory_efficient_attention):
        assert (attend(q, k, v) == 0).all(), attend
